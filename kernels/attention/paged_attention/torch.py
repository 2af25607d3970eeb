"""Paged attention in torch (`_attention_torch.py`): regrouped matrix products, one sequence at a time."""

from __future__ import annotations

from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.requirement import Requirement

KERNEL = Kernel(
    op="paged_attention",
    name="paged_attention_torch",
    provider="torch",
    language="python",
    target="gristmill.kernels.attention._attention_torch:launch_paged",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="regrouped matrix products, one sequence at a time",
)
