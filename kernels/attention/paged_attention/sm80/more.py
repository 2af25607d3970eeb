"""Paged attention in CUDA C++ for every NVIDIA GPU from sm_80 on, of what `paged_attention_sm80_split` leaves to Triton: batches with prompts over
e4m3 caches, and of heads of 80, 96 and 192 elements.

Decodes alone run by the same entries as there. This is a kernel of its own so that the records of the other one, which were made on GPUs, keep the
code that they name.
"""

from __future__ import annotations

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernels.attention.paged_attention import triton
from gristmill.kernels.attention.paged_attention.sm80 import spec

SOURCE = "_paged_flash_more_rare_sm80"
CODES_SOURCE = "_paged_flash_codes_rare_sm80"
ROWS = {64: 128, 80: 128, 96: 128, 128: 128, 192: 64, 256: 64}
"""Elements of a head -> query-head pairs of a KV head of a tile."""
PADDED = {80: 96}
"""Elements of a head -> those of the tiles that it has."""


def flash_source(head_dim: int, codes: bool) -> str | None:
    """The native source for any batch with heads of this size, over e4m3 caches if `codes`; None where the other kernel has it, or none."""
    if head_dim not in ROWS:
        return None
    return CODES_SOURCE if codes else None if head_dim in spec.FLASH_ROWS else SOURCE


def part_rows(head_dim: int) -> int:
    """Rows of a sequence whose context CTAs may divide, in the kernels for any batch."""
    return spec.most_rows(head_dim)


def route(
    seqs: int, max_q: int, heads: int, kv_heads: int, head_dim: int, ctas: int, codes: bool = False
) -> str:
    """What runs a batch of these host-known bounds: ``decode`` (for decodes alone), ``flash`` or ``triton``, which divides contexts of sequences
    of up to `spec.WHOLE_ROWS` rows. Arguments as of `spec.route`."""
    if spec.is_decode(max_q, heads, kv_heads, head_dim, ctas, codes):
        return "decode"
    rows = max_q * (heads // kv_heads)
    fills = rows > spec.WHOLE_ROWS or seqs * kv_heads >= ctas
    return "flash" if fills or rows <= part_rows(head_dim) else "triton"


def room(head_dim: int, ctas: int) -> int:
    """Bytes of the counters and of the partial results of either kernel."""
    return spec.decode_bytes(PADDED.get(head_dim, head_dim), ctas)


def accepts(problem: Problem) -> str | None:
    """None, or the reason why not."""
    dim, codes = problem.integer("head_dim"), problem["kv"] != "x"
    refusal = spec.accepts(problem)
    if refusal is None and flash_source(dim, codes) is None:
        return f"made for e4m3 caches and for a head_dim of 80, 96, 192, not {dim}"
    return refusal


def workspace(problem: Problem, config: Config) -> Workspace:
    """What the kernels here need, and behind it what Triton's does."""
    behind = triton.split_workspace(problem, config).bytes
    return Workspace(room(problem.integer("head_dim"), int(config["ctas"])) + behind, zeroed=True)


def sources(problem: Problem) -> tuple[str, ...]:
    """The native sources of the heads' size and the caches' type."""
    dim, codes = problem.integer("head_dim"), problem["kv"] != "x"
    return tuple(name for name in (spec.source(dim, codes), flash_source(dim, codes)) if name)


KERNEL = Kernel(
    op="paged_attention",
    name="paged_attention_sm80_more_split",
    provider="gristmill",
    language="cuda",
    target="gristmill.kernels.attention.paged_attention.sm80._launch_more:launch",
    requires=spec.KERNEL.requires,
    summary="as paged_attention_sm80_split, prompts over codes and of heads of 80, 96 and 192 too; Triton for few rows that leave the device idle",
    accepts=accepts,
    config=spec.config,
    space=spec.space,
    workspace=workspace,
    sources=sources,
    examples=(
        "q_tokens=5,seqs=5,max_q=1,max_ctx=300,total_ctx=800,heads=8,kv_heads=2,kv=fp8,kv_scale=head,lse=true",
        "q_tokens=9,seqs=5,max_q=2,max_ctx=300,total_ctx=800,heads=4,kv_heads=1,head_dim=96,block_size=7,lse=true",
        "q_tokens=300,seqs=3,max_q=200,max_ctx=421,total_ctx=700,heads=8,kv_heads=2,kv=fp8,kv_scale=head,lse=true",
        "q_tokens=261,seqs=6,max_q=257,max_ctx=300,total_ctx=900,heads=4,kv_heads=4,head_dim=64,x=fp16,kv=fp8,kv_scale=token,window=33,sinks=true,lse=true",
        "q_tokens=90,seqs=3,max_q=80,max_ctx=2300,total_ctx=4700,heads=6,kv_heads=2,block_size=7,kv=fp8,kv_scale=token,sinks=true,softcap=true",
        "q_tokens=90,seqs=4,max_q=80,max_ctx=1257,total_ctx=2500,heads=6,kv_heads=2,head_dim=256,window=1100,kv=fp8,kv_scale=token,lse=true",
        "q_tokens=9,seqs=3,max_q=4,max_ctx=2300,total_ctx=4700,heads=8,kv_heads=2,kv=fp8,kv_scale=token,lse=true",
        "q_tokens=261,seqs=6,max_q=257,max_ctx=300,total_ctx=900,heads=4,kv_heads=4,head_dim=80,x=fp16,window=33,sinks=true,lse=true",
        "q_tokens=90,seqs=3,max_q=80,max_ctx=2300,total_ctx=4700,heads=6,kv_heads=2,head_dim=96,block_size=7,softcap=true",
        "q_tokens=90,seqs=4,max_q=80,max_ctx=1257,total_ctx=2500,heads=6,kv_heads=2,head_dim=192,window=1100,x=fp16,lse=true",
        "q_tokens=90,seqs=4,max_q=80,max_ctx=257,total_ctx=500,heads=6,kv_heads=2,head_dim=80,block_size=24,kv=fp8,kv_scale=token,lse=true",
        "q_tokens=90,seqs=4,max_q=80,max_ctx=257,total_ctx=500,heads=6,kv_heads=2,head_dim=192,x=fp16,kv=fp8,kv_scale=head,sinks=true",
    ),
    priority=61,
)
