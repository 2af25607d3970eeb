"""Attention over dense sequences in CUDA C++ for Hopper: the un-absorbed prefill of MLA, any prefill without a cache, and encoders,
bidirectional or with windows on both sides.

The form of FlashAttention-3 (Shah et al., 2024): warp-specialised, wgmma from shared memory that TMA fills. Work is
dealt to the CTAs on the device, by arithmetic alone: nothing is counted or left in memory, and a captured graph stays right when lengths
change. docs/performance/mla_prefill_hopper.md has the measurements.
"""

from __future__ import annotations

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target

SMALLEST, LARGEST_KEY, LARGEST_VALUE = 64, 192, 128
"""Elements of a key or value at least; of a key and of a value at most. In shared memory they are padded to 128 or 192, and 128; heads of 64
are not where attention is bidirectional or in a window."""
MULTIPROCESSORS = 132

EXAMPLES = (
    "q_tokens=300,seqs=3,max_q=257,max_ctx=421,total_ctx=700,heads=4,kv_heads=4,lse=true",
    "q_tokens=700,seqs=7,max_q=300,max_ctx=900,total_ctx=2000,heads=6,kv_heads=2,x=fp16,lse=true",
    "q_tokens=130,seqs=2,max_q=129,max_ctx=257,total_ctx=400,heads=5,kv_heads=1,qk_dim=136,v_dim=72",
    "q_tokens=90,seqs=4,max_q=70,max_ctx=300,total_ctx=700,heads=4,kv_heads=4,qk_dim=64,v_dim=128,x=fp16",
    "q_tokens=260,seqs=2,max_q=200,max_ctx=400,total_ctx=600,heads=8,kv_heads=2,qk_dim=128,v_dim=128,lse=true",
    "q_tokens=290,seqs=5,max_q=257,max_ctx=257,total_ctx=290,heads=2,kv_heads=2,qk_dim=64,v_dim=64,lse=true,window_right=-1",
    "q_tokens=500,seqs=3,max_q=300,max_ctx=411,total_ctx=700,heads=4,kv_heads=2,qk_dim=128,v_dim=128,x=fp16,window_left=64,window_right=64",
    "q_tokens=300,seqs=4,max_q=200,max_ctx=300,total_ctx=500,heads=3,kv_heads=1,qk_dim=192,v_dim=128,lse=true,window_left=130,window_right=3",
)


def accepts(problem: Problem) -> str | None:
    """Half precision, heads of whole pieces of 16 bytes from 64 elements up to 192 and 128."""
    if problem["x"] == "fp32":
        return "takes fp16 or bf16, not fp32"
    qk_dim, v_dim = problem.integers("qk_dim", "v_dim")
    if qk_dim % 8 or v_dim % 8:
        return f"takes heads of multiples of 8 elements, not {qk_dim} and {v_dim}"
    if min(qk_dim, v_dim) < SMALLEST:
        return f"takes heads of {SMALLEST} elements and more, not {qk_dim} and {v_dim}"
    if qk_dim > LARGEST_KEY or v_dim > LARGEST_VALUE:
        return f"takes keys of up to {LARGEST_KEY} elements and values of up to {LARGEST_VALUE}, not {qk_dim} and {v_dim}"
    return None


def config(problem: Problem, target: Target) -> Config:
    """As many CTAs as the device runs at a time."""
    return {"ctas": target.multiprocessors or MULTIPROCESSORS}


KERNEL = Kernel(
    op="varlen_attention",
    name="varlen_attention_sm90",
    provider="gristmill",
    language="cuda",
    target="gristmill.kernels.attention.varlen_attention.sm90._launch:launch",
    requires=Requirement(
        features=(frozenset({"wgmma", "tma"}),),
        vendors=("nvidia",),
        code="cuda:sm_90a",
    ),
    summary="warp-specialised, wgmma over tiles of 128 keys; pairs of tiles of equal cost dealt to the CTAs on the device",
    accepts=accepts,
    supports=("window_left", "window_right"),
    config=config,
    examples=EXAMPLES,
    batch_invariant=True,
    waits=True,
    triggers=True,
    priority=54,
    proven="sm_90: NVIDIA H200",
)
