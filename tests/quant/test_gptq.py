"""GPTQ: a lower error on its calibration inputs, unchanged scales, and agreement with the textbook algorithm
column by column."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gristmill.quant import quantize
from gristmill.quant.gptq import gptq, search_scales


def inputs(k: int, rows: int = 600) -> torch.Tensor:
    """Returns correlated columns of very different energy."""
    generator = torch.Generator().manual_seed(1)
    mix = torch.randn(k, k, generator=generator) / k**0.5 + torch.eye(k)
    return torch.randn(rows, k, generator=generator) @ mix * torch.exp(torch.randn(k, generator=generator))


@pytest.mark.parametrize(
    "scheme", ["int4_g64", "int3_g32_zp", "int4_ch", "int8_ch", "mxfp4", "nvfp4", "fp8_block", "mxfp8", "fp8"]
)
@pytest.mark.parametrize("act_order", [True, False])
def test_outputs_are_nearer(scheme: str, act_order: bool) -> None:
    k = 256
    x, w = inputs(k), torch.randn(96, k, generator=torch.Generator().manual_seed(2))
    start = quantize(w, scheme)
    quantized = gptq(w, x.T @ x, start, act_order=act_order)
    assert (
        quantized.scheme == start.scheme and torch.equal(quantized.global_scale, start.global_scale)
        if start.global_scale is not None
        else True
    )
    for name in ("scales", "zero"):
        after, before = getattr(quantized, name), getattr(start, name)
        assert (after is None and before is None) or torch.equal(
            after.view(torch.uint8), before.view(torch.uint8)
        )
    plain, better = (float(((x @ (q.dequantize() - w).T) ** 2).mean()) for q in (start, quantized))
    assert better < 0.75 * plain, (better, plain)
    second = gptq(w, x.T @ x, start, act_order=act_order)
    assert torch.equal(second.codes, quantized.codes)  # deterministic


def textbook(w: np.ndarray, h: np.ndarray, scale: np.ndarray, damping: float) -> np.ndarray:
    """Optimal brain quantization column by column, with a new inverse after each, in float64."""
    w, n = w.astype(np.float64).copy(), w.shape[1]
    h = h + damping * np.mean(np.diag(h)) * np.eye(n)
    out = np.zeros_like(w)
    for i in range(n):
        inverse = np.linalg.inv(h[i:, i:])
        out[:, i] = np.clip(np.rint(w[:, i] / scale[:, 0]), -8, 7) * scale[:, 0]
        w[:, i:] -= np.outer((w[:, i] - out[:, i]) / inverse[0, 0], inverse[0])
    return out


def test_it_is_the_textbooks_algorithm() -> None:
    x, w = inputs(160, 900).double(), torch.randn(12, 160, generator=torch.Generator().manual_seed(3))
    start, h = quantize(w, "int4_ch"), x.T @ x
    expected = textbook(w.numpy(), h.numpy(), start.scales.float().numpy(), 0.01)
    actual = gptq(w, h, start, act_order=False).dequantize().numpy()
    assert (actual == expected.astype(np.float32)).mean() > 0.995  # a float32 tie may fall the other way


def test_columns_without_input_are_rounded_to_nearest() -> None:
    x, w = inputs(64), torch.randn(8, 64, generator=torch.Generator().manual_seed(4))
    x[:, 5] = 0
    start = quantize(w, "int4_g32")
    quantized = gptq(w, x.T @ x, start)
    assert torch.equal(quantized.dequantize()[:, 5], start.dequantize()[:, 5])


def test_searched_scales_round_better() -> None:
    x, w = inputs(256), torch.randn(40, 256, generator=torch.Generator().manual_seed(5))
    w[:, 7] *= 6  # this column decides the scale of its group, and has little energy
    x[:, 7] *= 0.01
    start, h = quantize(w, "int4_g64"), x.T @ x
    actual = search_scales(w, h, start)
    energy = h.diagonal()

    def error(q: torch.Tensor) -> torch.Tensor:
        return (energy * (w - q).square()).unflatten(1, (4, 64)).sum(2)

    searched_error, start_error = error(actual.dequantize()), error(start.dequantize())
    assert bool((searched_error <= start_error).all()) and float(searched_error.sum()) < 0.8 * float(
        start_error.sum()
    )
    ratio = actual.scales.float() / start.scales.float()
    assert float(ratio.max()) <= 1 and float(ratio.min()) > 0.59
    assert float(error(gptq(w, h, actual).dequantize()).sum()) < float(start_error.sum())
    for scheme in ("int4_g64_zp", "nvfp4"):
        same = quantize(w, scheme)
        assert search_scales(w, h, same) is same


def test_refusals() -> None:
    w = torch.randn(8, 64)
    start = quantize(w, "int4_g32")
    for hessian, message in (
        (torch.eye(32), r"needs a weight \[8, 64\] and a Hessian \[64, 64\]"),
        (torch.full((64, 64), torch.nan), "NaN or infinity"),
        (torch.zeros(64, 64), "no input was seen"),
    ):
        with pytest.raises(ValueError, match=message):
            gptq(w, hessian, start)
    with pytest.raises(ValueError, match="without minimums"):
        gptq(w, torch.eye(64), quantize(w, "int4_g32_min"))
