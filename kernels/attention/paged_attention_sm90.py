"""Paged attention in CUDA C++ for Hopper: prefill, chunked prefill and decodes of one batch in one launch.

The form of FlashAttention-3 (Shah et al., 2024) over a paged cache: warp-specialised, wgmma from shared memory that the
tensor copy engine fills, page by page. Work is found on the device, so a captured graph stays right when lengths change.
docs/performance/attention_hopper.md has the measurements, and what was tried.
"""

from __future__ import annotations

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target

HEAD_DIMS = (64, 128)
LARGEST_GROUP = 128
"""Query heads of a KV head at most: a tile has as many rows."""
COUNTER_BYTES = 16
MULTIPROCESSORS = 132


def accepts(problem: Problem) -> str | None:
    """Half precision, heads of 64 or 128."""
    if problem["x"] == "fp32":
        return "takes fp16 or bf16, not fp32"
    if problem.integer("head_dim") not in HEAD_DIMS:
        return f"made for a head_dim of 64 or 128, not {problem['head_dim']}"
    group = problem.integer("heads") // problem.integer("kv_heads")
    return f"{group} query heads a KV head are over {LARGEST_GROUP}" if group > LARGEST_GROUP else None


def config(problem: Problem, target: Target) -> Config:
    """As many CTAs as the device runs at a time."""
    return {"ctas": target.multiprocessors or MULTIPROCESSORS, "reading": 4}


def workspace(problem: Problem, config: Config) -> Workspace:
    """Counters of the work that is taken."""
    return Workspace(COUNTER_BYTES, zeroed=True)


KERNEL = Kernel(
    op="paged_attention",
    name="paged_attention_sm90",
    provider="gristmill",
    language="cuda",
    target="gristmill.kernels.attention._paged_attention_sm90:launch",
    requires=Requirement(features=(frozenset({"wgmma", "tma"}),), vendors=("nvidia",), code="cuda:sm_90a"),
    summary="warp-specialised, wgmma over pages that the tensor copy engine brings; work found on the device",
    accepts=accepts,
    config=config,
    workspace=workspace,
    sources=(
        "_paged_attention_sm90.cu",
        "_paged_attention_sm90.cuh",
        "_attention_copy_sm90.cuh",
        "_attention_work_sm90.cuh",
        "_hopper_sm90.cuh",
    ),
    batch_invariant=True,
    priority=70,
)
