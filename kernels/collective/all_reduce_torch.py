"""All-reduce by torch.distributed, in the dtype of x: NCCL on GPUs, gloo on CPUs; and in one order of summation for every size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.collective.all_reduce import reference
from gristmill.kernels.collective.groups import enter

if TYPE_CHECKING:
    from gristmill.kernels.calls import AllReduceCall


def launch(config: Config, call: AllReduceCall) -> None:
    """x [M, N], in place."""
    import torch.distributed as dist

    if call.world > 1:
        dist.all_reduce(call.x, group=enter(call.group, call.world))


def launch_in_order(config: Config, call: AllReduceCall) -> None:
    """x [M, N], in place: all-gather, then the sum in float32 in rank order, as the reference has it."""
    reference(call.x, call.group, call.world)


KERNELS = (
    Kernel(
        op="all_reduce",
        name="all_reduce_torch",
        provider="torch",
        language="python",
        target=f"{__name__}:launch",
        requires=Requirement(packages=(("torch", "2.11"),)),
        summary="torch.distributed.all_reduce: NCCL or gloo",
        priority=10,
    ),
    Kernel(
        op="all_reduce",
        name="all_reduce_ordered_torch",
        provider="torch",
        language="python",
        target=f"{__name__}:launch_in_order",
        requires=Requirement(packages=(("torch", "2.11"),)),
        summary="all-gather, then one sum in float32 in rank order: the same bits for every number of rows",
        batch_invariant=True,
    ),
)
