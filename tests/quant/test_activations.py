"""Activation quantizers: by hand, against numpy with ml_dtypes, and invalid input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gristmill.kernel_registry.scheme import ACTIVATION_FORMATS
from gristmill.quant import quantize_activation
from tests.quant import oracle

F32 = np.float32


def tokens(m: int = 9, k: int = 384, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator) * torch.exp2(
        torch.randint(-8, 8, (m, 1), generator=generator).float()
    )
    x[m // 2] = 0
    return x


def expected(x: np.ndarray, name: str) -> np.ndarray:
    out = np.empty_like(x)
    if name == "fp8":
        scale = np.abs(x).max() / F32(448)
        return oracle.e4m3(x / scale) * scale
    top = np.abs(x).max() / F32(6 * 448)
    size = {"fp8_g128": 128, "int8_g32": 32, "int8_g128": 128, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16}.get(
        name, x.shape[1]
    )
    floor = F32(1e-4 if name == "fp8_g128" else 1e-10)
    for i in range(x.shape[0]):
        for j in range(0, x.shape[1], size):
            v = x[i, j : j + size]
            if name == "nvfp4":
                r = oracle.nvfp4(v, top)
            elif name.startswith("mx"):
                r = oracle.mx(v, 8, oracle.e4m3) if name == "mxfp8" else oracle.mx(v, 2, oracle.e2m1)
            else:
                scale = max(np.abs(v).max(), floor) / F32(127 if name.startswith("int8") else 448)
                r = (
                    np.clip(np.rint(v / scale), -128, 127) * scale
                    if name.startswith("int8")
                    else oracle.e4m3(v / scale) * scale
                )
            out[i, j : j + size] = r
    return out


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "mxfp4", "fp8_g128"])
def test_by_row_every_row_is_quantized_as_it_would_be_alone(name: str) -> None:
    x = tokens()
    assert not quantize_activation(x, name, by_row=True).dequantize()[4].any()  # a row of zeros
    x[4] = x[0] / 3
    q = quantize_activation(x, name, by_row=True)
    alone = [expected(row[None], name) for row in x.numpy()]
    assert np.array_equal(q.dequantize().numpy(), np.concatenate(alone))
    if name == "nvfp4":
        assert q.global_scale is not None and q.global_scale.shape == (9, 1)
        assert not np.array_equal(q.dequantize().numpy(), expected(x.numpy(), name))


def test_what_rows_of_fp8_share_is_not_computed_by_row() -> None:
    with pytest.raises(ValueError, match="another format, and no scale"):
        quantize_activation(tokens(), "fp8", by_row=True)
    with pytest.raises(ValueError, match="another format, and no scale"):
        quantize_activation(tokens(), "nvfp4", by_row=True, scale=torch.ones(1))


@pytest.mark.parametrize("name", ACTIVATION_FORMATS)
def test_every_format_is_the_oracle(name: str) -> None:
    x = tokens()
    q = quantize_activation(x, name)
    assert np.array_equal(q.dequantize().numpy(), expected(x.numpy(), name))
    assert q.shape == (9, 384) and q.layout == "row"


@pytest.mark.parametrize("name", ACTIVATION_FORMATS)
def test_a_doubled_scale_is_seen(name: str) -> None:
    x = tokens()
    q = quantize_activation(x, name)
    flat = q.scales.view(torch.uint8).view(-1) if q.scales.dtype != torch.float32 else q.scales.view(-1)
    flat[0] = flat[0] + 8 if name == "nvfp4" else flat[0] + 1 if flat.dtype == torch.uint8 else flat[0] * 2
    assert not np.array_equal(q.dequantize().numpy(), expected(x.numpy(), name))


@pytest.mark.parametrize(
    "name, values, scales, shape",
    [
        ("fp8", torch.float8_e4m3fn, torch.float32, (1,)),
        ("fp8_token", torch.float8_e4m3fn, torch.float32, (2, 3, 1)),
        ("fp8_g128", torch.float8_e4m3fn, torch.float32, (2, 3, 2)),
        ("int8_token", torch.int8, torch.float32, (2, 3, 1)),
        ("int8_g32", torch.int8, torch.float32, (2, 3, 8)),
        ("int8_g128", torch.int8, torch.float32, (2, 3, 2)),
        ("mxfp8", torch.float8_e4m3fn, torch.uint8, (2, 3, 8)),
        ("mxfp4", torch.uint8, torch.uint8, (2, 3, 8)),
        ("nvfp4", torch.uint8, torch.float8_e4m3fn, (2, 3, 16)),
    ],
)
def test_dtypes_and_shapes(name, values, scales, shape) -> None:
    x = torch.randn(2, 3, 256, dtype=torch.bfloat16)
    q = quantize_activation(x, name)
    assert (q.values.dtype, q.scales.dtype, tuple(q.scales.shape)) == (values, scales, shape)
    assert q.values.shape == (2, 3, 128 if q.values.dtype == torch.uint8 else 256)
    assert torch.equal(q.dequantize(), quantize_activation(x.float(), name).dequantize())
    assert quantize_activation(x[:0], name).dequantize().shape == (0, 3, 256)


@pytest.mark.parametrize("name, groups", [("fp8_g128", 2), ("int8_g128", 2), ("int8_g32", 7)])
def test_partial_groups(name: str, groups: int) -> None:
    x = tokens(4, 200)
    q = quantize_activation(x, name)
    assert q.scales.shape == (4, groups) and q.values.shape == (4, 200)
    assert np.array_equal(q.dequantize().numpy(), expected(x.numpy(), name))


def test_static_scales() -> None:
    x = torch.tensor([[1.0, 1000.0, -3.0, 0.5]])
    q = quantize_activation(x, "fp8", scale=torch.tensor(2.0))
    assert q.scales.tolist() == [2] and q.dequantize().tolist() == [[1, 896, -3, 0.5]]  # 1000 / 2 saturates
    x = torch.randn(3, 32)
    top = quantize_activation(x, "nvfp4").global_scale
    with_static_scale = quantize_activation(x, "nvfp4", scale=top)
    assert torch.equal(with_static_scale.values, quantize_activation(x, "nvfp4").values)


@pytest.mark.parametrize("name", ACTIVATION_FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_values_are_not_hidden(name: str, value: float) -> None:
    x = tokens(3, 256)
    x[0, 5] = value
    assert bool(quantize_activation(x, name).dequantize()[0].isnan().any())


def test_bad_input() -> None:
    x = torch.randn(2, 40)
    with pytest.raises(ValueError, match="known: fp8, fp8_token"):
        quantize_activation(x, "int4")
    for name, group in (("mxfp8", 32), ("mxfp4", 32), ("nvfp4", 16)):
        with pytest.raises(ValueError, match=f"groups of {group} along K, and K = 40"):
            quantize_activation(x, name)
    with pytest.raises(TypeError, match="int64"):
        quantize_activation(x.long(), "fp8")
    with pytest.raises(ValueError, match="only fp8 and nvfp4 take a scale"):
        quantize_activation(x, "fp8_token", scale=torch.ones(1))
    with pytest.raises(ValueError, match=r"one number, got shape \[2\]"):
        quantize_activation(x, "fp8", scale=torch.ones(2))
    with pytest.raises(ValueError, match="K at least 1"):
        quantize_activation(x[:, :0], "fp8")


class Divisors(TorchDispatchMode):
    """Collects what floats are divided by."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.div:
            self.seen.append(args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ACTIVATION_FORMATS)
def test_no_scale_is_divided_by_a_python_number(name: str) -> None:
    """torch's CUDA kernels multiply by the reciprocal of a Python number: scales would differ from a CPU's in the last bit, and
    with them codes that are ties."""
    with Divisors() as divisors:
        quantize_activation(tokens(), name)
    assert divisors.seen and all(isinstance(value, torch.Tensor) for value in divisors.seen)


def test_a_reciprocal_would_change_codes() -> None:
    """Ties: 448 is 7 * 64, so 3 / 4 of the largest value is one of many values halfway between two codes."""
    x = torch.randn(257, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = quantize_activation(x, "fp8_token")
    scales = x.float().abs().amax(-1, keepdim=True) * torch.tensor(1 / 448)
    codes = (x.float() / scales).to(torch.float8_e4m3fn)
    differing = codes.view(torch.uint8) != exact.values.view(torch.uint8)
    assert (scales != exact.scales).any() and 0 < int(differing.sum()) < 1000
