"""All-gather by torch.distributed: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.collective.all_gather import reference

if TYPE_CHECKING:
    from gristmill.kernels.calls import AllGatherCall


def launch(config: Config, call: AllGatherCall) -> None:
    """x [M, N] -> out [M, world * N]."""
    reference(call.x, call.group, call.world, call.out)


KERNEL = Kernel(
    op="all_gather",
    name="all_gather_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="torch.distributed.all_gather_into_tensor, then the ranks' columns beside each other",
    batch_invariant=True,
)
