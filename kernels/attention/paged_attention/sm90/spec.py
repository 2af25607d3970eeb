"""Paged attention in CUDA C++ for Hopper: prefill, chunked prefill and decodes of one batch in one launch, also over e4m3 caches.

The form of FlashAttention-3 (Shah et al., 2024) over a paged cache: warp-specialised, wgmma from shared memory that TMA
fills page by page; and for decodes alone a small kernel of mma.sync products that splits every context. Work is
found on the device, so a captured graph stays right when lengths change.
docs/performance/attention_hopper.md has the measurements, and what was tried.
"""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target
from gristmill.kernels.attention.paged_attention import triton

LARGEST_HEAD = 128
"""Elements of a head up to which tiles have 128 keys; caches of codes have no larger heads but in decodes alone."""
WIDEST_HEAD = 256
"""Elements of a head that the kernel with tiles of 64 keys takes at most."""
DECODE_HEAD_DIMS = (64, 80, 96, 128, 192, 256)
LARGEST_GROUP = 128
"""Query heads of a KV head at most: a tile has as many rows."""
DECODE_ROWS = 8
"""Query-head pairs of a KV head that a tile of the kernel for decode has."""
DECODE_WARPS, WIDE_WARPS = 4, 8
"""Warps of a CTA of the kernel for decode, of which two run on a multiprocessor at a time, or one of twice as many."""
MOST_DECODE_ROWS = 16
"""The same, of the tile of twice as many rows, and of the split Triton kernel's; with heads of up to 128, and no codes."""
UNITS = 2048
"""Partial results of 16 rows that a batch may leave in the workspace; what does not fit there is done by one CTA."""
DECODE_COUNTERS_AT = 4 * (32 + UNITS)
COUNTER_BYTES = DECODE_COUNTERS_AT + 4 * 512
"""Counters, zero before and after a launch: of the work that is taken and of partial results, those of few decodes behind. A multiple of
128, so that what follows is aligned."""
MULTIPROCESSORS = 132
READING = 10
"""Weight of a tile of keys of a decode against one of a prefill, in eighths: decodes read, prefills multiply."""
PROMPT_ROWS = 192
"""Rows of a tile of batches that are mostly prompts: 192, of three warpgroups, or 128, of two as everything else."""
PART_TILES = 16
"""Tiles of 128 keys of a part of a decode's context, about; 0: contexts are whole, and one warpgroup adds all keys of a row."""


EXAMPLES = (
    "q_tokens=300,seqs=3,max_q=200,max_ctx=421,total_ctx=700,heads=8,kv_heads=2,lse=true",
    "q_tokens=261,seqs=6,max_q=257,max_ctx=300,total_ctx=900,heads=4,kv_heads=4,head_dim=64,x=fp16,window=33,sinks=true,lse=true",
    "q_tokens=90,seqs=2,max_q=70,max_ctx=257,total_ctx=400,heads=6,kv_heads=2,block_size=7,sinks=true",
    "q_tokens=80,seqs=4,max_q=64,max_ctx=140,total_ctx=333,heads=16,kv_heads=1,block_size=256,x=fp16",
    "q_tokens=70,seqs=2,max_q=65,max_ctx=300,total_ctx=450,heads=5,kv_heads=1,head_dim=64,block_size=24,window=130",
    "q_tokens=300,seqs=3,max_q=200,max_ctx=421,total_ctx=700,heads=8,kv_heads=2,kv=fp8,kv_scale=head,lse=true",
    "q_tokens=90,seqs=4,max_q=80,max_ctx=257,total_ctx=500,heads=6,kv_heads=2,head_dim=64,x=fp16,kv=fp8,kv_scale=token,window=33,sinks=true",
    "q_tokens=90,seqs=2,max_q=70,max_ctx=257,total_ctx=400,heads=6,kv_heads=2,head_dim=80,window=33,lse=true",
    "q_tokens=90,seqs=2,max_q=70,max_ctx=257,total_ctx=400,heads=6,kv_heads=2,window=33,lse=true,softcap=true",
    "q_tokens=90,seqs=4,max_q=80,max_ctx=257,total_ctx=500,heads=6,kv_heads=2,head_dim=64,x=fp16,kv=fp8,kv_scale=token,sinks=true,softcap=true",
    "q_tokens=90,seqs=2,max_q=70,max_ctx=257,total_ctx=400,heads=6,kv_heads=2,head_dim=256,window=33,lse=true,softcap=true",
    "q_tokens=90,seqs=4,max_q=80,max_ctx=257,total_ctx=500,heads=6,kv_heads=2,head_dim=192,x=fp16,sinks=true,lse=true",
)

SPLIT_EXAMPLES = (
    "q_tokens=5,seqs=5,max_q=1,max_ctx=300,total_ctx=800,heads=8,kv_heads=2,kv=fp8,kv_scale=head,lse=true",
    "q_tokens=5,seqs=5,max_q=1,max_ctx=300,total_ctx=800,heads=6,kv_heads=2,x=fp16,kv=fp8,kv_scale=token,window=33,sinks=true",
    "q_tokens=9,seqs=5,max_q=2,max_ctx=300,total_ctx=800,heads=4,kv_heads=1,head_dim=96,block_size=7,kv=fp8,kv_scale=token,lse=true",
    "q_tokens=5,seqs=5,max_q=1,max_ctx=300,total_ctx=800,heads=8,kv_heads=2,head_dim=256,sinks=true",
    "q_tokens=5,seqs=5,max_q=1,max_ctx=300,total_ctx=800,heads=8,kv_heads=2,head_dim=256,window=100,softcap=true",
    "q_tokens=5,seqs=5,max_q=1,max_ctx=300,total_ctx=800,heads=8,kv_heads=2,kv=fp8,kv_scale=head,lse=true,softcap=true",
    "q_tokens=5,seqs=5,max_q=1,max_ctx=300,total_ctx=800,heads=32,kv_heads=2,window=33,lse=true",
    "q_tokens=9,seqs=5,max_q=2,max_ctx=300,total_ctx=800,heads=14,kv_heads=2,head_dim=64,x=fp16,sinks=true,softcap=true",
)
"""Also of decodes alone, which take other head sizes too."""


def takes(head_dim: int, codes: bool, page: int) -> bool:
    """Whether the kernels for any batch take heads of this size: whole pieces of 16 bytes, which are padded to 64, 128 or 256 elements in
    shared memory. Caches are e4m3 if `codes`, in pages of `page` tokens."""
    if head_dim <= LARGEST_HEAD:
        return head_dim % (16 if codes else 8) == 0
    return not codes and head_dim <= WIDEST_HEAD and head_dim % 8 == 0 and page % 8 == 0


def route(
    max_q: int,
    heads: int,
    kv_heads: int,
    ctas: int = MULTIPROCESSORS,
    head_dim: int = 128,
    codes: bool = False,
    page: int = 16,
) -> str:
    """The kernel for a batch of these host-known bounds: ``decode`` (for decodes alone), ``triton`` or ``any``.

    Args:
        ctas: the configuration's CTAs. The kernel for decode needs one per KV head.
        codes: the caches are in e4m3.
        page: tokens of a page.
    """
    rows = max_q * (heads // kv_heads)
    most = DECODE_ROWS if codes or head_dim > LARGEST_HEAD else MOST_DECODE_ROWS
    if rows <= most and head_dim in DECODE_HEAD_DIMS and kv_heads <= ctas:
        return "decode"
    return "any" if takes(head_dim, codes, page) and max_q > 1 and rows > MOST_DECODE_ROWS else "triton"


def parts_bytes(head_dim: int, ctas: int) -> int:
    """Memory of partial results: sums, maximum and sum of weights of 16 rows, for each unit and four times for each CTA.
    Rows are padded to 64, 128 or 256 elements.

    What the kernel for decode needs, two of up to 16 rows for each of at most two CTAs per multiprocessor, is less.
    """
    padded = 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256
    return (UNITS + 4 * ctas) * (padded // 8 + 1) * 512


def accepts(problem: Problem) -> str | None:
    """Half precision; heads of up to 256 elements, of codes or over small pages of up to 128."""
    dim, page, codes = problem.integer("head_dim"), problem.integer("block_size"), problem["kv"] != "x"
    if takes(dim, codes, page):
        return accepts_group(problem)
    if codes:
        return f"made for a head_dim of a multiple of 16 up to {LARGEST_HEAD} over e4m3 codes, not {dim}"
    if dim % 8 == 0 and dim <= WIDEST_HEAD:
        return f"made for pages of a multiple of 8 tokens where head_dim is over {LARGEST_HEAD}, not {page}"
    return f"made for a head_dim of a multiple of 8 up to {WIDEST_HEAD}, not {dim}"


def accepts_split(problem: Problem) -> str | None:
    """That, and what decodes alone take."""
    return accepts_group(problem) if problem.integer("head_dim") in DECODE_HEAD_DIMS else accepts(problem)


def accepts_group(problem: Problem) -> str | None:
    """Half precision, heads of a KV group that fit in a tile."""
    if problem["x"] == "fp32":
        return "takes fp16 or bf16, not fp32"
    group = problem.integer("heads") // problem.integer("kv_heads")
    return f"{group} query heads per KV head are over {LARGEST_GROUP}" if group > LARGEST_GROUP else None


def config(problem: Problem, target: Target) -> Config:
    """As many CTAs as the device runs at a time. Contexts are whole, so that the order of a row's sums depends on its context alone."""
    return {
        "ctas": target.multiprocessors or MULTIPROCESSORS,
        "part_tiles": 0,
        "reading": READING,
        "prompt_rows": PROMPT_ROWS,
    }


def workspace(problem: Problem, config: Config) -> Workspace:
    """The counters, and the partial results behind them."""
    return Workspace(
        COUNTER_BYTES + parts_bytes(problem.integer("head_dim"), int(config["ctas"])), zeroed=True
    )


def split_config(problem: Problem, target: Target) -> Config:
    """That with contexts in parts, and the tiles of the split Triton kernel."""
    return {
        **triton.split_config(problem, target),
        **config(problem, target),
        "part_tiles": PART_TILES,
        "cta_warps": 0,
    }


def split_space(problem: Problem, target: Target) -> Iterable[Config]:
    """What the kernel that `route` names may choose. ``triton``: its tiles. ``any``: rows of a tile of prompts, with heads of up to 64
    elements. ``decode``: warps of a CTA, where there is a choice (`has_wide`)."""
    base = split_config(problem, target)
    ctas, dim = int(base["ctas"]), problem.integer("head_dim")
    max_q, heads, kv_heads = problem.integers("max_q", "heads", "kv_heads")
    kernel = route(max_q, heads, kv_heads, ctas, dim, problem["kv"] != "x", problem.integer("block_size"))
    if kernel == "triton":
        return [{**base, **one} for one in triton.split_space(problem, target)]
    if kernel == "any":
        return [{**base, "prompt_rows": one} for one in ((PROMPT_ROWS, 128) if dim <= 64 else (PROMPT_ROWS,))]
    if not has_wide(problem):
        return [base]
    wide = is_wide(problem.integer("seqs"), kv_heads, ctas)
    return [base, {**base, "cta_warps": DECODE_WARPS if wide else WIDE_WARPS}]


def has_wide(problem: Problem) -> bool:
    """Whether the kernel for decode also has CTAs of twice as many warps, of which a multiprocessor has one instead of two: contexts are cut
    in half as many pieces, or not at all, so that less is merged."""
    return problem.integer("head_dim") in (64, 128) and problem["kv"] == "x" and not problem["softcap"]


def is_wide(seqs: int, kv_heads: int, ctas: int) -> bool:
    """Whether the entry takes them for `cta_warps` = 0, from the sizes of a call: for one context, and where each pair of a context and a KV
    head has a CTA and at most a sixteenth of the multiprocessors is idle, as FlashAttention-4 has it: contexts that are about equal stay
    whole then."""
    return seqs == 1 or ctas * 15 <= seqs * kv_heads * 16 <= ctas * 16


def split_workspace(problem: Problem, config: Config) -> Workspace:
    """The counters, and behind them the partial results of whichever kernel runs."""
    dim, ctas = problem.integer("head_dim"), int(config["ctas"])
    behind = max(
        parts_bytes(dim, ctas),
        triton.split_workspace(problem, config).bytes,
    )
    return Workspace(COUNTER_BYTES + behind, zeroed=True)


REQUIRES = Requirement(
    features=(frozenset({"wgmma", "tma"}),),
    vendors=("nvidia",),
    packages=(("triton", ""),),
    code="cuda:sm_90a",
)
KERNELS = (
    Kernel(
        op="paged_attention",
        name="paged_attention_sm90",
        provider="gristmill",
        language="cuda",
        target="gristmill.kernels.attention.paged_attention.sm90._launch:launch",
        requires=REQUIRES,
        summary="warp-specialised, wgmma over pages that TMA brings; work found on the device, contexts whole",
        accepts=accepts,
        config=config,
        workspace=workspace,
        examples=EXAMPLES,
        batch_invariant=True,
        waits=True,
        triggers=True,
        priority=54,
        proven="sm_90: NVIDIA H200",
    ),
    Kernel(
        op="paged_attention",
        name="paged_attention_sm90_split",
        provider="gristmill",
        language="cuda",
        target="gristmill.kernels.attention.paged_attention.sm90._launch:launch_split",
        requires=REQUIRES,
        summary="as paged_attention_sm90 with long contexts in parts; decodes alone have their own kernel, some head sizes Triton's",
        accepts=accepts_split,
        config=split_config,
        space=split_space,
        workspace=split_workspace,
        examples=(*EXAMPLES, *SPLIT_EXAMPLES),
        waits=True,
        triggers=True,
        priority=70,
        proven="sm_90: NVIDIA H200",
    ),
)
