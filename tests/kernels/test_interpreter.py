"""Triton's interpreter as repaired by `gristmill.kernels.interpreter` and accelerated by
`_interpreter_speed`."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from gristmill.kernels.interpreter import InterpreterError, install
from tests.conftest import HAS_GPU

pytestmark = pytest.mark.skipif(HAS_GPU, reason="with a GPU here kernels are compiled")


@triton.jit
def twice(values):
    return values * 2


@triton.jit
def shapes_kernel(x, rows, columns, wide, M: tl.constexpr, N: tl.constexpr):
    """Passes tensors of one shape in both orders, and of one shape in several dtypes, through a device
    function."""
    m, n = tl.arange(0, M), tl.arange(0, N)
    values = tl.load(x + m[:, None] * N + n[None, :])
    tl.store(rows + m[:, None] * N + n[None, :], twice(values))
    tl.store(columns + n[:, None] * M + m[None, :], twice(tl.trans(values)))
    tl.store(wide + m[:, None] * N + n[None, :], twice(values.to(tl.int64) << 32))


@pytest.mark.parametrize(("m", "n"), [(2, 8), (8, 2), (1, 16), (4, 4)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16, torch.float32])
def test_shapes_and_dtypes_are_not_confused(m: int, n: int, dtype: torch.dtype) -> None:
    install()
    x = (torch.arange(m * n).reshape(m, n) - 5).to(dtype)
    rows, columns = torch.empty_like(x), torch.empty(n, m, dtype=dtype)
    wide = torch.empty(m, n, dtype=torch.int64)
    shapes_kernel[(1,)](x, rows, columns, wide, M=m, N=n)
    assert torch.equal(rows, x * 2)
    assert torch.equal(columns, x.T * 2)
    assert torch.equal(wide, x.long() << 33)


@pytest.mark.parametrize("name", ["_get_np_dtype", "InterpretedFunction"])
def test_an_interpreter_of_other_names_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first name is replaced before the second.
    monkeypatch.setattr(interpreter, "_get_np_dtype", interpreter._get_np_dtype)
    monkeypatch.delattr(interpreter, name)
    with pytest.raises(InterpreterError, match=name):
        install.__wrapped__()
