"""Permute by torch: a stable argsort."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.moe.permute.op import reference

if TYPE_CHECKING:
    from gristmill.kernels.calls import PermuteCall


def launch(config: Config, call: PermuteCall) -> None:
    """ids [T, K] -> expert_offsets [experts + 1], permutation and inverse [T * K]."""
    for out, result in zip(
        (call.expert_offsets, call.permutation, call.inverse), reference(call.ids, call.experts), strict=True
    ):
        out.copy_(result)


KERNEL = Kernel(
    op="permute",
    name="permute_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="torch.argsort, stable",
    batch_invariant=True,  # integers: nothing is rounded
)
