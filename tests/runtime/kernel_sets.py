"""Sets of kernels that whole models are tested with: torch, our C++ at each level, our Triton.

The policy is strict, so nothing falls back; `check` reads from the plans which kernels ran.
"""

from __future__ import annotations

from dataclasses import replace

from gristmill.kernel_registry.policy import Policy
from gristmill.kernels.native import LEVEL_CHAINS
from gristmill.runtime.llm import LLM
from tests.native.levels import runnable_levels

LEVELS = tuple(runnable_levels())
FAST = ("torch", *(f"cpu-{level}" for level in LEVELS))
"""Sets that run long texts; the Triton interpreter runs one short prompt."""
KERNEL_SETS = (*FAST, "triton")


def strict(kernel_set: str, policy: Policy) -> Policy:
    """Returns `policy` restricted to one set of kernels."""
    provider, _, level = kernel_set.partition("-")
    # Triton's layout of nvfp4 stores one float32 per row: 5.6 % of a weight with 128 columns, which exceeds
    # the default bound.
    memory = 1.1 if provider == "triton" else policy.weight_memory
    return replace(
        policy, pins={"*": (f"*_{provider}",)}, strict=True, cpu_level=level or None, weight_memory=memory
    )


def check(llm: LLM, kernel_set: str) -> None:
    """Raises AssertionError if a kernel of another set or C++ of another level ran, or if nothing ran."""
    provider, _, level = kernel_set.partition("-")
    entries = [
        entry for bound in llm.model.plans.bound.values() for entry in bound.entries if entry is not None
    ]
    assert entries
    strangers = {entry.kernel for entry in entries if not entry.kernel.endswith(f"_{provider}")}
    assert not strangers, f"{kernel_set}: {', '.join(sorted(strangers))} ran"
    if level:
        # A kernel that gains nothing from a level is built for the next lower one.
        levels = {str(entry.config["level"]) for entry in entries}
        assert levels <= set(LEVEL_CHAINS[level]), f"{kernel_set}: code of {', '.join(sorted(levels))} ran"
        assert level in levels, f"{kernel_set}: nothing of this level ran, only {', '.join(sorted(levels))}"
