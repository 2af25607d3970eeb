"""Absorbed latent attention in CUDA C++ for every NVIDIA GPU from sm_80 on: decodes, speculative tokens and chunks of one batch.

Keys and values lie in shared memory once, as in FlashMLA (DeepSeek, 2025); the rest is made for `mma.sync` and `cp.async` (attend.cuh). Contexts
are cut into equal pieces and merged in a second launch (work.cuh, merge.cuh).
"""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.attention.mla_attention.sm90 import spec as hopper
from gristmill.kernels.attention.mla_attention.sm90.spec import LATENT, accepts

ROWS = 32
"""Rows, (query, head) pairs of a sequence, of a tile; 16 where no sequence has more."""
PROCESSORS = 108
"""Multiprocessors of a target that does not say how many it has."""
SMALL = ("sm_86", "sm_87", "sm_89", "sm_120", "sm_121")
"""Targets whose multiprocessors have shared memory for one CTA; others have it for two with tiles of 16 rows."""
LEAST = 2
"""Steps of 32 keys of a part of a context at least."""
ALIGNMENT = 128

EXAMPLES = (
    *hopper.EXAMPLES,
    "q_tokens=1,seqs=1,max_q=1,max_ctx=2000,total_ctx=2000,heads=5,block_size=7,x=fp16,lse=true",
)


def config(problem: Problem, target: Target) -> Config:
    """What runs at a time. ctas: multiprocessors. resident: CTAs with tiles of 16 rows on one. least: steps of a part of a context."""
    resident = 1 if target.name in SMALL else 2
    return {"ctas": target.multiprocessors or PROCESSORS, "resident": resident, "least": LEAST, "whole": 0}


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Longer and shorter parts of contexts."""
    base = config(problem, target)
    return [{**base, "least": least} for least in (LEAST, 1, 4, 8)]


def whole_config(problem: Problem, target: Target) -> Config:
    """As `config`; contexts are never cut, so a row takes the same steps in every batch."""
    return {**config(problem, target), "whole": 1}


def parts_at(ctas: int) -> int:
    """Where parts of contexts begin in the workspace: behind a record for each of up to 2 ctas CTAs."""
    return cdiv(32 * ctas, ALIGNMENT) * ALIGNMENT


def workspace(problem: Problem, config: Config) -> Workspace:
    """The records, and two parts of contexts for each CTA: sums, maximum and sum of the weights of a tile's rows."""
    ctas = int(config["ctas"])
    return Workspace(0 if config["whole"] else parts_at(ctas) + 2 * ctas * ROWS * (LATENT + 2) * 4)


REQUIRES = Requirement(
    features=(frozenset({"mma.bf16", "cp_async", "ldmatrix"}),),
    vendors=("nvidia",),
    code="cuda:compute_80",
)
KERNELS = (
    Kernel(
        op="mla_attention",
        name="mla_attention_sm80",
        provider="gristmill",
        language="cuda",
        target="gristmill.kernels.attention.mla_attention.sm80._launch:launch",
        requires=REQUIRES,
        summary="16 or 32 (query, head) pairs at a time by mma.sync and cp.async, keys and values read once, contexts cut evenly and merged",
        accepts=accepts,
        config=config,
        space=space,
        workspace=workspace,
        sources=lambda problem: ("_mla_attention_rare_sm80",),
        examples=EXAMPLES,
        priority=60,
    ),
    Kernel(
        op="mla_attention",
        name="mla_attention_sm80_whole",
        provider="gristmill",
        language="cuda",
        target="gristmill.kernels.attention.mla_attention.sm80._launch:launch",
        requires=REQUIRES,
        summary="as mla_attention_sm80, contexts whole",
        accepts=accepts,
        config=whole_config,
        workspace=workspace,
        sources=lambda problem: ("_mla_attention_rare_sm80",),
        examples=EXAMPLES,
        batch_invariant=True,
        priority=52,
    ),
)
