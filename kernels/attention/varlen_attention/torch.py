"""Attention over dense sequences in torch (`_attention_torch.py`): regrouped matrix products, one sequence at a time."""

from __future__ import annotations

from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.requirement import Requirement

KERNEL = Kernel(
    op="varlen_attention",
    name="varlen_attention_torch",
    provider="torch",
    language="python",
    target="gristmill.kernels.attention._attention_torch:launch_varlen",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="regrouped matrix products, one sequence at a time",
    supports=("window_left", "window_right"),
)
