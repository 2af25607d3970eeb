"""Merging partial attentions by torch: the reference, about ten elementwise launches."""

from __future__ import annotations

from typing import Any

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.attention.merge_attention_states import reference


def launch(config: Config, a: Any, a_lse: Any, b: Any, b_lse: Any, out: Any, lse: Any) -> None:
    """a, b [T, H, D] with a_lse, b_lse [T, H] -> out [T, H, D], lse [T, H]."""
    merged, total = reference(a, a_lse, b, b_lse)
    out.copy_(merged)
    lse.copy_(total)


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
