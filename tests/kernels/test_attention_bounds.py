"""Which attention of decode steps takes as long for any bound: what the kernel for decodes on Hopper runs, and nothing else."""

from __future__ import annotations

import pytest

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.attention.bounds import takes_any_bound

PAGED = default_registry().op("paged_attention")
QWEN = "heads=16,kv_heads=8,head_dim=128,x=bf16"


@pytest.mark.parametrize(
    ("kernel", "problem", "max_q", "expected"),
    [
        ("paged_attention_sm90_split", QWEN, 1, True),
        ("paged_attention_sm90_split", f"{QWEN},kv=fp8,kv_scale=head", 1, True),
        ("paged_attention_sm90_split", QWEN, 8, True),
        ("paged_attention_sm90_split", QWEN, 9, False),  # rows that the kernel for decodes has not
        ("paged_attention_sm90_split", "heads=8,kv_heads=8,head_dim=72,x=bf16", 1, False),  # Triton's
        ("paged_attention_triton_split", QWEN, 1, False),
        ("paged_attention_sm90", QWEN, 1, False),
    ],
)
def test_only_what_finds_its_work_on_the_device(
    kernel: str, problem: str, max_q: int, expected: bool
) -> None:
    static = PAGED.static(PAGED.problem(f"seqs=1,q_tokens=1,max_q=1,max_ctx=1,total_ctx=1,{problem}"))
    chosen = default_registry().kernel("paged_attention", kernel)
    config = chosen.config(static, Target.parse("h200"))
    assert takes_any_bound(kernel, config, static, max_q) is expected
