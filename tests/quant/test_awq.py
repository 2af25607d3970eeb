"""AWQ's channel scales: the grid point with the least error of the outputs, shared where columns share a
channel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gristmill.quant import quantize
from gristmill.quant.awq import ALPHAS, channel_scales, output_error, search_channel_scales


def case(k: int = 128, n: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a weight and inputs with a few large channels, which is AWQ's use case."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(700, k, generator=generator)
    x[:, ::17] *= 25
    return torch.randn(n, k, generator=generator), x


def rtn(weight: torch.Tensor):
    return quantize(weight, "int4_g64")


def test_scales_follow_the_root_of_the_energy() -> None:
    energy = torch.tensor([4.0, 0.25, 0.0, 1.0])
    assert torch.equal(channel_scales(energy, 0.0), torch.ones(4))
    # 2, 1/2 and 1 to the power 1/2, whose middle is 1; a channel without input is not scaled
    assert torch.allclose(channel_scales(energy, 0.5), torch.tensor([2**0.5, 2**-0.5, 1.0, 1.0]))
    assert torch.allclose(channel_scales(9 * energy, 1.0), torch.tensor([2.0, 0.5, 1.0, 1.0]))


def test_the_error_is_that_of_the_outputs() -> None:
    w, x = case()
    rounded = rtn(w).dequantize()
    expected = float(((x.double() @ (rounded - w).double().T) ** 2).sum())
    assert output_error(w, x.T @ x, rounded) == pytest.approx(expected, rel=1e-4)


def test_the_best_of_the_grid_is_found() -> None:
    """Compares with float64 numpy on the inputs themselves."""
    w, x = case()
    scales = search_channel_scales([(w, x.T @ x)], rtn)
    errors = []
    for alpha in ALPHAS:
        s = channel_scales((x.double() ** 2).sum(0), alpha)
        rounded = quantize(w * s, "int4_g64").dequantize().double().numpy() / s.double().numpy()
        errors.append(float(np.square(x.double().numpy() @ (rounded - w.double().numpy()).T).sum()))
    best = int(np.argmin(errors))
    assert best > 0 and errors[best] < 0.5 * errors[0]
    assert torch.allclose(scales, channel_scales((x**2).sum(0), ALPHAS[best]), rtol=1e-4)


def test_without_large_channels_nothing_is_lost() -> None:
    w = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    h = torch.eye(64)
    s = search_channel_scales([(w, h)], rtn)
    assert output_error(w, h, rtn(w * s).dequantize() / s) <= output_error(w, h, rtn(w).dequantize())


def test_columns_share_a_scale() -> None:
    w, x = case()
    columns = torch.arange(64).repeat(2)
    scales = search_channel_scales([(w, x.T @ x)], rtn, columns)
    assert scales.shape == (64,)
    energy = (x**2).sum(0).view(2, 64).sum(0)
    assert any(torch.allclose(scales, channel_scales(energy, alpha), rtol=1e-4) for alpha in ALPHAS[1:])


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"got \[8, 64\] with \[32, 32\]"):
        search_channel_scales([(torch.ones(8, 64), torch.eye(32))], rtn)
    with pytest.raises(ValueError, match="got none"):
        search_channel_scales([], rtn)
