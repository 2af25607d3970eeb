"""The spec of the Hopper kernels of paged attention: what they take and refuse, when decode goes to the split kernel, workspaces."""

from __future__ import annotations

import pytest

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.attention import paged_attention_triton as triton
from gristmill.kernels.attention.paged_attention_sm90 import COUNTER_BYTES, EXAMPLES, KERNELS, is_decode

OP = default_registry().op("paged_attention")
ONE, SPLIT = KERNELS
BASE = "q_tokens=64,seqs=4,max_q=32,max_ctx=64,total_ctx=200"


HOPPER = Target.parse("sm_90")


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_what_is_refused(kernel: object) -> None:
    accepts = ONE.accepts if kernel is ONE else SPLIT.accepts
    for given, reason in (
        ("heads=4,kv_heads=1,x=fp32", "fp32"),
        ("heads=4,kv_heads=1,head_dim=96", "96"),
        ("heads=4,kv_heads=1,head_dim=256", "256"),
        ("heads=129,kv_heads=1", "129 query heads"),
    ):
        refusal = accepts(OP.problem(f"{BASE},{given}"))
        assert refusal is not None and reason in refusal
    for given in (
        "heads=128,kv_heads=1",
        "heads=6,kv_heads=2,head_dim=64,x=fp16,window=3,sinks=true,lse=true",
    ):
        for block_size in (1, 7, 8, 16, 256):
            assert accepts(OP.problem(f"{BASE},{given},block_size={block_size}")) is None


def test_examples_are_accepted() -> None:
    assert len(EXAMPLES) > 3
    for given in EXAMPLES:
        assert ONE.accepts(OP.problem(given)) is None


def test_decode_alone_goes_to_the_split_kernel() -> None:
    assert is_decode(1, 4) and is_decode(1, 64) and is_decode(4, 4) and is_decode(16, 1)
    assert not is_decode(5, 4) and not is_decode(2, 16) and not is_decode(2048, 4)


def test_the_counters_come_before_what_the_split_kernel_asks_for() -> None:
    problem = OP.problem(f"{BASE},heads=32,kv_heads=8")
    config = SPLIT.config(problem, HOPPER)
    space, behind = SPLIT.workspace(problem, config), triton.split_workspace(problem, config)
    assert space.zeroed and space.bytes == COUNTER_BYTES + behind.bytes
    assert COUNTER_BYTES % 128 == 0
    assert ONE.workspace(problem, ONE.config(problem, HOPPER)).bytes == COUNTER_BYTES
    assert set(triton.split_config(problem, HOPPER)) < set(config)


def test_ranks() -> None:
    """The split pair stands above Triton's, and what is batch-invariant above the batch-invariant one of Triton."""
    ranks = {kernel.name: kernel.priority for kernel in (*KERNELS, *triton.KERNELS)}
    assert ranks["paged_attention_sm90_split"] > ranks["paged_attention_triton_split"]
    assert (
        ranks["paged_attention_triton_split"]
        > ranks["paged_attention_sm90"]
        > ranks["paged_attention_triton"]
    )
    assert ONE.batch_invariant and not SPLIT.batch_invariant
