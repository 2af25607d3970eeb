"""Memory for parameters, in huge pages where Linux offers them on request.

Filling new CPU memory is limited by page faults of 4 KB; with pages of 2 MB it takes a
quarter of the time, and kernels that read the weights have fewer TLB misses. The advice covers only whole pages inside a
tensor, so memory use does not grow.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import cdiv

HUGE_PAGE = 2 << 20
BLOCK = 64 << 20
ALIGNMENT = 64
"""Of a tensor in a block: a cache line."""
_MADV_HUGEPAGE = 14


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """An uninitialised contiguous tensor, as torch.empty gives it."""
    out = torch.empty(tuple(shape), dtype=dtype, device=device)
    if out.device.type == "cpu" and out.nbytes >= 2 * HUGE_PAGE:
        start = cdiv(out.data_ptr(), HUGE_PAGE) * HUGE_PAGE
        stop = (out.data_ptr() + out.nbytes) // HUGE_PAGE * HUGE_PAGE
        advise = _madvise()
        if advise is not None and stop > start:
            advise(start, stop - start, _MADV_HUGEPAGE)  # advice: where it is not taken pages are small
    return out


class _Blocks:
    """Memory that small parameters share: the current block, and how much of it is taken."""

    def __init__(self) -> None:
        self.block: Tensor | None = None
        self.taken = 0

    def take(self, size: int) -> Tensor:
        """uint8 [size]."""
        begin = cdiv(self.taken, ALIGNMENT) * ALIGNMENT
        if self.block is None or begin + size > self.block.numel():
            self.block, begin = empty((BLOCK,), torch.uint8), 0
        self.taken = begin + size
        return self.block[begin : self.taken]


_blocks: ContextVar[_Blocks | None] = ContextVar("_blocks", default=None)


@contextmanager
def shared_blocks() -> Iterator[None]:
    """Inside, `parameter` gives parts of blocks in huge pages, where single tensors of a few megabytes hardly contain one.

    A block is freed with the last of its tensors: for the parameters of one model.
    """
    token = _blocks.set(_Blocks())
    try:
        yield
    finally:
        _blocks.reset(token)


def parameter(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised contiguous CPU tensor that is kept, inside `shared_blocks` as part of a block."""
    size, blocks = math.prod(shape) * dtype.itemsize, _blocks.get()
    if blocks is None or size > BLOCK // 2:
        return empty(shape, dtype)
    return blocks.take(size).view(dtype).view(tuple(shape))


def copy_of(tensor: Tensor) -> Tensor:
    """A contiguous copy of a tensor, on its device."""
    return empty(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """The C library's madvise, None where it has none (Windows)."""
    try:
        madvise = ctypes.CDLL(None).madvise
    except (AttributeError, OSError, TypeError):
        return None
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise.restype = ctypes.c_int
    call: Callable[[int, int, int], int] = madvise
    return call
