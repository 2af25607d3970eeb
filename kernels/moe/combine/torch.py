"""Combine by torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.moe.combine.op import reference

if TYPE_CHECKING:
    from gristmill.kernels.calls import CombineCall


def launch(config: Config, call: CombineCall) -> None:
    """y [P, H] -> out [T, H]: one gather and one addition for each k, so that the order is fixed."""
    call.out.copy_(reference(call.y, call.inverse, call.weights))


KERNEL = Kernel(
    op="combine",
    name="combine_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="gather, multiply and add, k by k",
    batch_invariant=True,
)
