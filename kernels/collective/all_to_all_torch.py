"""All-to-all by torch.distributed: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.collective.groups import enter

if TYPE_CHECKING:
    from gristmill.kernels.calls import AllToAllCall


def launch(config: Config, call: AllToAllCall) -> None:
    """x [M, world, N] -> out [M, world, N]."""
    import torch
    import torch.distributed as dist

    if call.world == 1:
        call.out.copy_(call.x)
        return
    sent = call.x.transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=enter(call.group, call.world))
    call.out.copy_(received.transpose(0, 1))


KERNEL = Kernel(
    op="all_to_all",
    name="all_to_all_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="torch.distributed.all_to_all_single, with the columns of a rank as rows",
    batch_invariant=True,
)
