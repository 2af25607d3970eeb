"""Paged attention in CUDA C++ for every NVIDIA GPU from sm_80 on: decodes alone, and prefill, chunked prefill and decodes of one batch in one launch.

Decodes run by the schedule of decode on Hopper (sm90/_paged_decode_sm90.cuh), which is made of mma.sync and cp.async; batches with prompts in the
form of FlashAttention-2 over a paged cache (flash.cuh); what neither takes by the split Triton kernel.
"""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.attention.paged_attention import triton

SOURCES = {
    64: "_paged_decode_rare_sm80",
    128: "_paged_decode_rare_sm80",
    80: "_paged_decode_more_rare_sm80",
    96: "_paged_decode_more_rare_sm80",
    192: "_paged_decode_more_rare_sm80",
    256: "_paged_decode_more_rare_sm80",
}
"""Elements of a head -> the source of its kernels."""
CODES_SOURCE = "_paged_decode_codes_rare_sm80"
"""The source of the kernels over caches of e4m3 codes, of all these sizes."""
FLASH_SOURCE = "_paged_flash_rare_sm80"
"""The source of the kernels for any batch."""
FLASH_ROWS = {64: 128, 128: 128, 256: 64}
"""Elements of a head -> query-head pairs of a KV head of their tile; the sizes that they are made for."""
STEPS_HEAD = 128
"""Elements of a head whose kernels for any batch are made for steps of 32 and of 64 keys."""
WHOLE_ROWS = 64
"""Rows of a sequence up to which its context may be worth dividing, which the kernels for any batch do up to 16 rows, Triton's for more."""
LARGEST_HEAD = 128
"""Elements of a head up to which a tile has 16 rows, else 8; 8 over codes."""
PROCESSORS = 108
"""Multiprocessors of a target that does not say how many it has."""
ALIGNMENT = 128
SMALL = ("sm_86", "sm_87", "sm_89", "sm_120", "sm_121")
"""Targets whose multiprocessors have shared memory for one CTA; others have it for two."""


def source(head_dim: int, codes: bool) -> str | None:
    """The native source of heads of this size, over e4m3 caches if `codes`; None without one."""
    return CODES_SOURCE if codes and head_dim in SOURCES else SOURCES.get(head_dim)


def most_rows(head_dim: int, codes: bool = False) -> int:
    """Query-head pairs of a KV head that a tile has at most."""
    return 8 if codes or head_dim > LARGEST_HEAD else 16


def is_decode(max_q: int, heads: int, kv_heads: int, head_dim: int, ctas: int, codes: bool = False) -> bool:
    """Whether a batch of these host-known bounds is one of decodes alone, with a CTA for each KV head."""
    return max_q * (heads // kv_heads) <= most_rows(head_dim, codes) and kv_heads <= ctas


def route(
    seqs: int, max_q: int, heads: int, kv_heads: int, head_dim: int, ctas: int, codes: bool = False
) -> str:
    """What runs a batch of these host-known bounds: ``decode`` (for decodes alone), ``flash`` or ``triton``.

    Args:
        ctas: the configuration's CTAs, those that run at a time.
        codes: the caches are in e4m3.
    """
    group = heads // kv_heads
    if head_dim not in SOURCES:
        return "triton"
    if is_decode(max_q, heads, kv_heads, head_dim, ctas, codes):
        return "decode"
    fills = max_q * group > WHOLE_ROWS or seqs * kv_heads >= ctas
    return "flash" if fills and not codes and group <= FLASH_ROWS.get(head_dim, 0) else "triton"


def parts_at(ctas: int) -> int:
    """Where partial results begin in the workspace: behind a counter for each CTA."""
    return cdiv(4 * ctas, ALIGNMENT) * ALIGNMENT


def decode_bytes(head_dim: int, ctas: int) -> int:
    """Memory of the counters, and of two partial results of each CTA: sums, maximum and sum of weights of a tile's rows."""
    return parts_at(ctas) + 2 * ctas * most_rows(head_dim) * (head_dim + 2) * 4


def accepts(problem: Problem) -> str | None:
    """None, or the reason why not."""
    dim, (heads, kv_heads) = problem.integer("head_dim"), problem.integers("heads", "kv_heads")
    most = most_rows(dim, problem["kv"] != "x")
    if problem["x"] == "fp32":
        return "takes fp16 or bf16, not fp32"
    if dim not in SOURCES:
        return f"made for a head_dim of {', '.join(map(str, sorted(SOURCES)))}, not {dim}"
    if heads // kv_heads > most:
        return f"{heads // kv_heads} query heads per KV head are over {most}"
    return None


def has_steps(problem: Problem) -> bool:
    """Whether a configuration says how many keys a step of the kernels for any batch has."""
    return problem.integer("head_dim") == STEPS_HEAD and problem["kv"] == "x"


def config(problem: Problem, target: Target) -> Config:
    """As many CTAs as the device runs at a time, and the tiles of the split Triton kernel.

    keys: of a step. Steps of 64 read queries half as often and need fewer instructions for a key, but their 66 KiB of shared memory fit twice
    on larger multiprocessors alone.
    """
    small = target.name in SMALL
    ctas = (1 if small else 2) * (target.multiprocessors or PROCESSORS)
    steps = {"keys": 32 if small else 64} if has_steps(problem) else {}
    return {**triton.split_config(problem, target), "ctas": ctas, **steps}


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """One and two CTAs per multiprocessor, steps of 32 keys and of 64 where two such CTAs fit, and tiles of the split Triton kernel where that
    is what runs."""
    base, processors = config(problem, target), target.multiprocessors or PROCESSORS
    seqs, max_q, heads, kv_heads, dim = problem.integers("seqs", "max_q", "heads", "kv_heads", "head_dim")
    yield base
    for ctas in (processors, 2 * processors):
        if ctas != base["ctas"]:
            yield {**base, "ctas": ctas}
    if base.get("keys") == 64:
        yield {**base, "keys": 32}
    if route(seqs, max_q, heads, kv_heads, dim, int(base["ctas"]), problem["kv"] != "x") == "triton":
        for one in triton.split_space(problem, target):
            yield {**base, **one}


def workspace(problem: Problem, config: Config) -> Workspace:
    """What the kernel for decodes needs, and behind it what Triton's does."""
    behind = triton.split_workspace(problem, config).bytes
    return Workspace(decode_bytes(problem.integer("head_dim"), int(config["ctas"])) + behind, zeroed=True)


def sources(problem: Problem) -> tuple[str, ...]:
    """The native sources of the heads' size and the caches' type."""
    dim, codes = problem.integer("head_dim"), problem["kv"] != "x"
    decode = source(dim, codes)
    if decode is None:
        return ()
    return (decode,) if codes or dim not in FLASH_ROWS else (decode, FLASH_SOURCE)


KERNEL = Kernel(
    op="paged_attention",
    name="paged_attention_sm80_split",
    provider="gristmill",
    language="cuda",
    target="gristmill.kernels.attention.paged_attention.sm80._launch:launch",
    requires=Requirement(
        features=(frozenset({"mma.bf16", "cp_async", "ldmatrix"}),),
        vendors=("nvidia",),
        packages=(("triton", ""),),
        code="cuda:compute_80",
    ),
    summary="FlashAttention-2 by mma.sync and cp.async, decodes alone stream-K; prompts over codes and of some head sizes by Triton",
    accepts=accepts,
    config=config,
    space=space,
    workspace=workspace,
    sources=sources,
    examples=(
        "q_tokens=5,seqs=5,max_q=1,max_ctx=300,total_ctx=800,heads=8,kv_heads=2,lse=true",
        "q_tokens=9,seqs=5,max_q=2,max_ctx=300,total_ctx=800,heads=14,kv_heads=2,head_dim=64,x=fp16,sinks=true,softcap=true",
        "q_tokens=5,seqs=5,max_q=1,max_ctx=300,total_ctx=800,heads=32,kv_heads=2,window=33,lse=true",
        "q_tokens=9,seqs=5,max_q=2,max_ctx=300,total_ctx=800,heads=4,kv_heads=1,head_dim=96,block_size=7,lse=true",
        "q_tokens=5,seqs=5,max_q=1,max_ctx=300,total_ctx=800,heads=8,kv_heads=2,head_dim=256,window=100,softcap=true",
        "q_tokens=3,seqs=3,max_q=1,max_ctx=2000,total_ctx=2100,heads=6,kv_heads=2,head_dim=192,x=fp16,sinks=true",
        "q_tokens=7,seqs=7,max_q=1,max_ctx=90,total_ctx=300,heads=5,kv_heads=5,head_dim=80,x=fp16,block_size=24",
        "q_tokens=5,seqs=5,max_q=1,max_ctx=300,total_ctx=800,heads=8,kv_heads=2,kv=fp8,kv_scale=head,lse=true",
        "q_tokens=9,seqs=5,max_q=2,max_ctx=300,total_ctx=800,heads=4,kv_heads=1,head_dim=96,block_size=7,x=fp16,kv=fp8,kv_scale=token,window=33,sinks=true",
        "q_tokens=5,seqs=5,max_q=1,max_ctx=300,total_ctx=800,heads=8,kv_heads=1,head_dim=256,kv=fp8,kv_scale=token,softcap=true",
        "q_tokens=300,seqs=3,max_q=200,max_ctx=421,total_ctx=700,heads=8,kv_heads=2,lse=true",
        "q_tokens=261,seqs=6,max_q=257,max_ctx=300,total_ctx=900,heads=4,kv_heads=4,head_dim=64,x=fp16,window=33,sinks=true,lse=true",
        "q_tokens=90,seqs=3,max_q=80,max_ctx=2300,total_ctx=4700,heads=6,kv_heads=2,block_size=7,sinks=true,softcap=true",
        "q_tokens=90,seqs=4,max_q=80,max_ctx=1257,total_ctx=2500,heads=6,kv_heads=2,head_dim=256,window=1100,x=fp16,lse=true",
        "q_tokens=300,seqs=3,max_q=200,max_ctx=421,total_ctx=700,heads=8,kv_heads=2,kv=fp8,kv_scale=head,lse=true",
    ),
    priority=60,
)
