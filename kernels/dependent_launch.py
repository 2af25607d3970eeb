"""Programmatic dependent launch of kernels in Triton (Hopper and newer): a kernel is launched while the one ahead of it on the stream still runs,
and waits for its end before it reads or writes anything. Small kernels between products are short beside what a launch takes.

    @jit
    def double_kernel(x, n, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
        begin(OVERLAP)
        ...


    double_kernel[grid](x, n, BLOCK=1024, num_warps=4, **overlapped(x))

Every program calls `begin` before its first access to memory. The next kernel may be launched from then on; it waits in turn if it was launched
this way, and else begins when this one has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from gristmill.kernels.interpreter import interpreting
from gristmill.kernels.lazy_triton import jit, tl

if TYPE_CHECKING:
    from torch import Tensor

    from gristmill.kernel_registry.target import Target

SINCE = 90
"""The compute capability, times ten, from which on NVIDIA GPUs launch kernels this way."""


@jit
def begin(OVERLAP: tl.constexpr):
    """Lets the next kernel start, and waits for the end of the previous one."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def overlapped(x: Tensor) -> Mapping[str, bool]:
    """What a launch on the device of `x` passes: OVERLAP, and Triton's option."""
    return _options(x.get_device()) if x.is_cuda else {"OVERLAP": False}


def overlap_on(target: Target) -> dict[str, bool]:
    """The constant of a compilation ahead of time."""
    backend, arch, _ = target.triton_target or ("", 0, 0)
    return {"OVERLAP": backend == "cuda" and int(arch) >= SINCE}


@cache
def _options(device: int) -> Mapping[str, bool]:
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None or interpreting() or major * 10 + minor < SINCE:
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}
