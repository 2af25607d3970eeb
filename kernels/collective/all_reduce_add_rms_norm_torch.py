"""All-reduce by torch.distributed in the output's memory, then the residual addition and the norm by torch, or in one Triton kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.collective import all_reduce_torch
from gristmill.kernels.norm import fused_add_rms_norm_torch, fused_add_rms_norm_triton
from gristmill.kernels.norm.rms_norm_triton import config, space

if TYPE_CHECKING:
    from torch import Tensor


def _sum(x: Tensor, group: str, world: int, out: Tensor) -> None:
    if out.data_ptr() != x.data_ptr():
        out.copy_(x)
    all_reduce_torch.launch({}, out, group, world)


def launch(
    config: Config,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    group: str,
    world: int,
    out: Tensor,
) -> None:
    """x [M, N], residual [M, N] (written in place), weight [N] -> out [M, N]."""
    _sum(x, group, world, out)
    fused_add_rms_norm_torch.launch({}, out, residual, weight, eps, out)


def launch_triton(
    config: Config,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    group: str,
    world: int,
    out: Tensor,
) -> None:
    """As `launch`."""
    _sum(x, group, world, out)
    fused_add_rms_norm_triton.launch(config, out, residual, weight, eps, out)


KERNELS = (
    Kernel(
        op="all_reduce_add_rms_norm",
        name="all_reduce_add_rms_norm_torch",
        provider="torch",
        language="python",
        target=f"{__name__}:launch",
        requires=Requirement(packages=(("torch", "2.11"),)),
        summary="torch.distributed.all_reduce, add_, torch.nn.functional.rms_norm",
        priority=10,
    ),
    Kernel(
        op="all_reduce_add_rms_norm",
        name="all_reduce_add_rms_norm_triton",
        provider="gristmill",
        language="triton",
        target=f"{__name__}:launch_triton",
        requires=Requirement(code="triton", packages=(("torch", "2.11"),)),
        summary="torch.distributed.all_reduce, then fused_add_rms_norm_triton",
        config=config,
        space=space,
        priority=20,
    ),
)
