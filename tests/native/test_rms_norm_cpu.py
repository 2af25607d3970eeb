"""gm_rms_norm, called directly at every level that this processor runs."""

from __future__ import annotations

import pytest
import torch

from gristmill.kernels import native
from gristmill.kernels.norm.rms_norm_cpu import ENTRY

from .levels import runnable_levels

EPS = 1e-5
# Half an ulp of each, relative to the value.
DTYPES = {
    torch.float32: 1.2e-7,
    torch.float16: 2**-11,
    torch.bfloat16: 2**-8,
}


def run(level: str, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
    ENTRY.cpu({"level": level}, ENTRY.op.Call(x, w, EPS, out))


def exact(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x64 = x.double()
    return x64 / (x64.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * w.double()


def test_levels_are_found() -> None:
    assert runnable_levels(), f"no level of {native.manifest()} runs here"


@pytest.mark.parametrize("level", runnable_levels())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,cols", [(1, 1), (3, 7), (5, 257), (257, 64), (2, 4096)])
def test_matches_float64(level: str, dtype: torch.dtype, rows: int, cols: int) -> None:
    generator = torch.Generator().manual_seed(rows * 10007 + cols)
    x = torch.randn(rows, cols, generator=generator).to(dtype)
    w = torch.randn(cols, generator=generator).to(dtype)
    # Rows lie in a wider buffer of NaN: a read past a row gives NaN, and a write past a row is detected.
    guard = torch.full((rows + 1, cols + 5), float("nan"), dtype=dtype)
    guard[:rows, :cols] = x
    sink = torch.full((rows + 1, cols + 3), -7.0, dtype=dtype)
    run(level, guard[:rows, :cols], w, sink[:rows, :cols])
    expected = exact(x, w)
    error = (sink[:rows, :cols].double() - expected).abs()
    assert (error <= expected.abs() * (DTYPES[dtype] * 1.01 + 6e-7) + 1e-7).all(), error.max()
    assert (sink[:, cols:] == -7).all() and (sink[rows] == -7).all()


@pytest.mark.parametrize("level", runnable_levels())
def test_in_place_and_empty(level: str) -> None:
    x, w = torch.randn(4, 33), torch.randn(33)
    expected = exact(x, w)
    run(level, x, w, x)
    torch.testing.assert_close(x.double(), expected, rtol=1e-6, atol=1e-6)
    out = torch.full((0, 33), 1.0)
    run(level, torch.empty(0, 33), w, out)


@pytest.mark.parametrize("level", runnable_levels())
def test_result_does_not_depend_on_threads(level: str) -> None:
    x, w = torch.randn(300, 515), torch.randn(515)
    outs = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            outs.append(torch.empty_like(x))
            run(level, x, w, outs[-1])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("level", runnable_levels())
def test_special_values(level: str) -> None:
    x = torch.tensor([[0.0] * 19, [float("nan")] + [1.0] * 18, [float("inf")] + [1.0] * 18])
    out = torch.empty_like(x)
    run(level, x, torch.ones(19), out)
    assert (out[0] == 0).all()
    assert out[1].isnan().all()
    assert out[2, 0].isnan() and (out[2, 1:] == 0).all()


def test_bad_dtype_is_refused() -> None:
    x = torch.zeros(1, 4, dtype=torch.int8)
    with pytest.raises(TypeError, match="gm_rms_norm.*dtype"):
        run(runnable_levels()[0], x, x, x)
