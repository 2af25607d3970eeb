"""Merging partial attentions by torch: the reference, about ten elementwise launches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.attention.merge_attention_states.op import reference

if TYPE_CHECKING:
    from gristmill.kernels.calls import MergeAttentionStatesCall


def launch(config: Config, call: MergeAttentionStatesCall) -> None:
    """a, b [T, H, D] with a_lse, b_lse [T, H] -> out [T, H, D], lse [T, H]."""
    merged, total = reference(call.a, call.a_lse, call.b, call.b_lse)
    call.out.copy_(merged)
    call.lse.copy_(total)


KERNEL = Kernel(
    op="merge_attention_states",
    name="merge_attention_states_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="elementwise float32",
    batch_invariant=True,
)
