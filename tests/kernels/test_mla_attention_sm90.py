"""The spec of the Hopper kernels of MLA: accepted and refused problems, workspaces, ranks."""

from __future__ import annotations

import pytest

from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.attention.mla_attention import triton
from gristmill.kernels.attention.mla_attention.sm90.spec import COUNTER_BYTES, EXAMPLES, KERNELS, PART_BYTES

OP = default_registry().op("mla_attention")
CUT, WHOLE = KERNELS
BASE = "q_tokens=64,seqs=4,max_q=32,max_ctx=64,total_ctx=200"
HOPPER = Target.parse("sm_90")


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_what_is_refused(kernel: Kernel) -> None:
    for axes, reason in (
        ("heads=16,x=fp32", "fp32"),
        ("heads=16,latent_dim=256", "not 256 and 64"),
        ("heads=16,rope_dim=32", "not 512 and 32"),
    ):
        refusal = kernel.accepts(OP.problem(f"{BASE},{axes}"))
        assert refusal is not None and reason in refusal
    for heads in (1, 8, 16, 20, 128):
        for block_size in (1, 7, 16, 64, 256):
            assert kernel.accepts(OP.problem(f"{BASE},heads={heads},block_size={block_size},x=fp16")) is None


def test_examples_are_accepted() -> None:
    assert len(EXAMPLES) > 3
    for axes in EXAMPLES:
        assert CUT.accepts(OP.problem(axes)) is None


def test_workspaces() -> None:
    """The workspace holds two partial results per CTA if contexts are split, and only the counters if not."""
    problem = OP.problem(f"{BASE},heads=128")
    config, unsplit = CUT.config(problem, HOPPER), WHOLE.config(problem, HOPPER)
    assert config["slack"] >= 0 > unsplit["slack"]
    space = CUT.workspace(problem, config)
    assert space.zeroed and space.bytes == COUNTER_BYTES + 2 * config["ctas"] * PART_BYTES
    assert WHOLE.workspace(problem, unsplit).bytes == COUNTER_BYTES
    assert PART_BYTES == 64 * 512 * 4 + 64 * 2 * 4


def test_the_configuration_holds_no_size_of_a_problem() -> None:
    small, large = (
        OP.problem(f"q_tokens={n},seqs={n},max_q=1,max_ctx={n * 64},total_ctx={n * 64},heads=16")
        for n in (1, 64)
    )
    assert CUT.config(small, HOPPER) == CUT.config(large, HOPPER)
    assert CUT.space is not None and CUT.config(small, HOPPER) in list(CUT.space(small, HOPPER))


def test_ranks() -> None:
    """The kernel that splits contexts ranks above Triton's, the batch-invariant one above Triton's
    batch-invariant one."""
    ranks = {kernel.name: kernel.priority for kernel in (*KERNELS, *triton.KERNELS)}
    assert ranks["mla_attention_sm90"] > ranks["mla_attention_triton_split"]
    assert (
        ranks["mla_attention_triton_split"]
        > ranks["mla_attention_sm90_whole"]
        > ranks["mla_attention_triton"]
    )
    assert WHOLE.batch_invariant and not CUT.batch_invariant
