"""Memory of this process that others can map: a file without a name, whose pages the system allocates on the first write."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref

import torch
from torch import Tensor

_FILES: dict[int, int] = {}
"""Descriptors by the address of their memory."""


def zeros(nbytes: int) -> Tensor:
    """uint8 [nbytes] of zeros. OSError, OverflowError or MemoryError: the system refuses so much."""
    if not hasattr(os, "memfd_create"):  # not Linux: nobody else can map it
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    mmap.mmap(-1, nbytes).close()  # refused if there is too little memory, which a file is not
    descriptor = os.memfd_create("gristmill-cache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # who maps it can rely on its size
        memory = mmap.mmap(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    _FILES[tensor.data_ptr()] = descriptor
    weakref.finalize(memory, _close, tensor.data_ptr(), descriptor)
    return tensor


def descriptor_of(tensor: Tensor) -> int | None:
    """The file of a tensor that begins where the memory of a file does; None for other memory."""
    return _FILES.get(tensor.data_ptr())


def _close(address: int, descriptor: int) -> None:
    del _FILES[address]
    os.close(descriptor)
