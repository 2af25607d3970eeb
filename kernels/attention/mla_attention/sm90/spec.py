"""Absorbed latent attention in CUDA C++ for Hopper: decodes, speculative tokens and chunks of one batch in one launch.

The form of FlashMLA (DeepSeek, 2025): the sums of 64 (query, head) pairs lie in the registers of two warpgroups, half of
the columns each, which take turns at tiles of keys. Work is found on the device, and contexts that are cut are merged in
the same launch, so a captured graph stays right when lengths change. docs/performance/mla_hopper.md has the measurements.
"""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target

LATENT, ROPE = 512, 64
COUNTER_BYTES = 4096
"""Counters at the start of the workspace: zero before and after a launch."""
PART_BYTES = 64 * (LATENT + 2) * 4
"""What a part of a context takes of the workspace: 64 rows of sums, their maxima and the sums of their weights."""
MULTIPROCESSORS = 132
MOST_CTAS = 512
SLACK = 4
"""Contexts stay whole where the longest queue of tiles of 64 keys is then at most so many tiles over an even share: what
writing, reading and merging the parts costs."""

EXAMPLES = (
    "q_tokens=5,seqs=5,max_q=1,max_ctx=700,total_ctx=1500,heads=16,lse=true",
    "q_tokens=7,seqs=3,max_q=4,max_ctx=333,total_ctx=700,heads=128,block_size=16",
    "q_tokens=33,seqs=4,max_q=20,max_ctx=257,total_ctx=600,heads=20,block_size=1,lse=true",
    "q_tokens=6,seqs=3,max_q=2,max_ctx=130,total_ctx=300,heads=72,block_size=24,x=fp16,lse=true",
)


def accepts(problem: Problem) -> str | None:
    """Half precision, latents of 512 elements and rotated keys of 64."""
    if problem["x"] == "fp32":
        return "takes fp16 or bf16, not fp32"
    latent, rope = problem.integer("latent_dim"), problem.integer("rope_dim")
    if (latent, rope) != (LATENT, ROPE):
        return f"made for latent_dim {LATENT} and rope_dim {ROPE}, not {latent} and {rope}"
    return None


def config(problem: Problem, target: Target) -> Config:
    """As many CTAs as the device runs at a time. least: tiles of 64 keys that a CTA takes at least, more for more rows to merge."""
    ctas = min(target.multiprocessors or MULTIPROCESSORS, MOST_CTAS)
    return {"ctas": ctas, "least": 1 if problem.integer("heads") <= 32 else 2, "slack": SLACK}


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Larger and smaller pieces of contexts."""
    base = config(problem, target)
    return [{**base, "least": least, "slack": slack} for least in (1, 2, 4) for slack in (0, 4, 16)]


def whole_config(problem: Problem, target: Target) -> Config:
    """As `config`; contexts are never cut, so a row takes the same steps in every batch."""
    return {**config(problem, target), "slack": -1}


def workspace(problem: Problem, config: Config) -> Workspace:
    """The counters, and two parts of contexts for each CTA: those that its range of tiles begins and ends in."""
    parts = 0 if int(config["slack"]) < 0 else 2 * int(config["ctas"])
    return Workspace(COUNTER_BYTES + parts * PART_BYTES, zeroed=True)


REQUIRES = Requirement(
    features=(frozenset({"wgmma", "tma"}),),
    vendors=("nvidia",),
    code="cuda:sm_90a",
)
KERNELS = (
    Kernel(
        op="mla_attention",
        name="mla_attention_sm90",
        provider="gristmill",
        language="cuda",
        target="gristmill.kernels.attention.mla_attention.sm90._launch:launch",
        requires=REQUIRES,
        summary="two warpgroups take turns at tiles of keys; work found on the device, contexts cut evenly and merged in one launch",
        accepts=accepts,
        config=config,
        space=space,
        workspace=workspace,
        examples=EXAMPLES,
        priority=70,
        proven="sm_90: NVIDIA H200",
    ),
    Kernel(
        op="mla_attention",
        name="mla_attention_sm90_whole",
        provider="gristmill",
        language="cuda",
        target="gristmill.kernels.attention.mla_attention.sm90._launch:launch",
        requires=REQUIRES,
        summary="as mla_attention_sm90, contexts whole",
        accepts=accepts,
        config=whole_config,
        workspace=workspace,
        examples=EXAMPLES,
        batch_invariant=True,
        priority=54,
        proven="sm_90: NVIDIA H200",
    ),
)
