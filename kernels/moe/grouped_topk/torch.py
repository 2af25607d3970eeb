"""Grouped top-k by torch: `topk` over integer keys, which makes ties deterministic on every device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.moe.grouped_topk.op import reference

if TYPE_CHECKING:
    from gristmill.kernels.calls import GroupedTopkCall


def launch(config: Config, call: GroupedTopkCall) -> None:
    """logits [..., E] -> weights, ids [..., top_k]. The reference is plain torch operators: this runs it."""
    results = reference(
        call.logits,
        call.top_k,
        call.bias,
        call.n_group,
        call.topk_group,
        call.scoring,
        call.renormalize,
        call.scale,
    )
    call.weights.copy_(results[0])
    call.ids.copy_(results[1])


KERNEL = Kernel(
    op="grouped_topk",
    name="grouped_topk_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="torch.topk over distinct integer keys",
    batch_invariant=True,
)
