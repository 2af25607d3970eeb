"""Permute in Triton."""

from __future__ import annotations

from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.requirement import Requirement

KERNEL = Kernel(
    op="permute",
    name="permute_triton",
    provider="gristmill",
    language="triton",
    target="gristmill.kernels.moe._permute_triton:launch",
    aot="gristmill.kernels.moe._permute_triton:aot",
    requires=Requirement(code="triton"),
    summary="counting sort, one program per expert, no atomics",
    priority=50,
)
