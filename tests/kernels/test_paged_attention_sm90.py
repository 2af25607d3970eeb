"""The spec of the Hopper kernels of paged attention: accepted and refused problems, routing of decode to the
split kernel, workspaces."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.attention.paged_attention import triton
from gristmill.kernels.attention.paged_attention.sm90 import _launch as launchers
from gristmill.kernels.attention.paged_attention.sm90.spec import (
    COUNTER_BYTES,
    DECODE_HEAD_DIMS,
    KERNELS,
    parts_bytes,
    route,
)
from gristmill.kernels.native import library_dir
from gristmill.kernels.native_call import CallEntry

OP = default_registry().op("paged_attention")
ONE, SPLIT = KERNELS
BASE = "q_tokens=64,seqs=4,max_q=32,max_ctx=64,total_ctx=200"


HOPPER = Target.parse("sm_90")


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_what_is_refused(kernel: Kernel) -> None:
    assert kernel.accepts is not None
    for axes, reason in (
        ("heads=4,kv_heads=1,x=fp32", "fp32"),
        ("heads=4,kv_heads=1,head_dim=72,kv=fp8,kv_scale=head", "multiple of 16"),
        ("heads=4,kv_heads=1,head_dim=68", "multiple of 8"),
        ("heads=4,kv_heads=1,head_dim=320", "320"),
        ("heads=4,kv_heads=1,head_dim=320,kv=fp8,kv_scale=head", "320"),
        ("heads=129,kv_heads=1", "129 query heads"),
    ):
        refusal = kernel.accepts(OP.problem(f"{BASE},{axes}"))
        assert refusal is not None and reason in refusal
    for axes in (
        "heads=128,kv_heads=1",
        "heads=6,kv_heads=2,head_dim=64,x=fp16,window=3,sinks=true,lse=true",
    ):
        for block_size in (1, 7, 8, 16, 256):
            assert kernel.accepts(OP.problem(f"{BASE},{axes},block_size={block_size}")) is None


def test_only_decodes_alone_take_codes_and_odd_pages_of_heads_over_128() -> None:
    assert ONE.accepts is not None and SPLIT.accepts is not None
    for axes, reason in (
        ("head_dim=192,block_size=7", "multiple of 8 tokens"),
        ("head_dim=256,kv=fp8,kv_scale=token", "up to 128"),
    ):
        problem = OP.problem(f"{BASE},heads=4,kv_heads=1,{axes}")
        assert reason in str(ONE.accepts(problem)) and SPLIT.accepts(problem) is None
    for axes in (
        "head_dim=80",
        "head_dim=112",
        "head_dim=96,kv=fp8,kv_scale=token",
        "head_dim=192",
        "head_dim=256",
    ):
        problem = OP.problem(f"{BASE},heads=4,kv_heads=1,{axes}")
        assert ONE.accepts(problem) is SPLIT.accepts(problem) is None


def test_examples_are_accepted() -> None:
    for kernel in KERNELS:
        assert kernel.accepts is not None and len(kernel.examples) > 3
        for axes in kernel.examples:
            assert kernel.accepts(OP.problem(axes)) is None


def test_decodes_alone_go_to_the_kernels_for_few_rows() -> None:
    """Any number of contexts with few rows each goes to the kernel that splits by length, more rows than its tile has to
    Triton's; batches with more rows per sequence go to the kernel for any batch."""
    assert route(1, 32, 8) == route(2, 32, 8) == route(1, 8, 1) == route(8, 8, 8) == "decode"
    assert route(1, 64, 4) == route(4, 32, 8) == route(2, 8, 1, head_dim=64) == "decode"
    assert route(1, 64, 1) == route(1, 17, 1) == route(4, 32, 8, head_dim=192) == "triton"
    assert route(1, 132, 132) == "decode" and route(1, 133, 133) == "triton"  # more KV heads than CTAs
    assert route(1, 32, 8, ctas=7) == "triton"
    assert route(5, 32, 8) == route(2, 16, 1) == route(2048, 32, 8) == "any"
    assert route(1, 64, 8, codes=True) == route(1, 16, 8, head_dim=256) == "decode"
    assert route(1, 8, 1, head_dim=192) == route(1, 16, 8, head_dim=256) == "decode"
    assert route(5, 32, 8, head_dim=96) == route(5, 32, 8, codes=True) == "any"
    assert route(4, 32, 8, codes=True) == route(1, 64, 4, codes=True) == "triton"
    assert route(5, 32, 8, head_dim=192) == route(5, 32, 8, head_dim=256, page=64) == "any"
    assert route(5, 32, 8, head_dim=192, page=7) == route(5, 32, 8, head_dim=256, codes=True) == "triton"


def test_the_counters_come_before_what_the_kernels_share() -> None:
    problem = OP.problem(f"{BASE},heads=32,kv_heads=8")
    config = SPLIT.config(problem, HOPPER)
    ctas = int(config["ctas"])
    behind = max(triton.split_workspace(problem, config).bytes, parts_bytes(128, ctas))
    space = SPLIT.workspace(problem, config)
    assert space.zeroed and space.bytes == COUNTER_BYTES + behind
    assert COUNTER_BYTES % 128 == 0
    decode_config = ONE.config(problem, HOPPER)
    assert ONE.workspace(problem, decode_config).bytes == COUNTER_BYTES + parts_bytes(
        128, int(decode_config["ctas"])
    )
    # Of decode: per SM two CTAs with two parts of 8 rows each, and per row the sums and two numbers.
    for head_dim in (64, 80, 96, 128, 192, 256):
        assert 2 * 2 * int(decode_config["ctas"]) * 8 * (head_dim + 2) * 4 <= parts_bytes(
            head_dim, int(decode_config["ctas"])
        )
    assert set(triton.split_config(problem, HOPPER)) < set(config)


@pytest.mark.parametrize(
    ("text", "configurations"),
    [
        ("q_tokens=16,seqs=16,max_q=1,max_ctx=1024,total_ctx=16384,heads=32,kv_heads=8", 2),
        ("q_tokens=64,seqs=16,max_q=4,max_ctx=4096,total_ctx=65536,heads=32,kv_heads=8,head_dim=64", 2),
        ("q_tokens=16,seqs=16,max_q=1,max_ctx=4096,total_ctx=65536,heads=16,kv_heads=8,head_dim=96", 1),
        ("q_tokens=16,seqs=16,max_q=1,max_ctx=4096,total_ctx=65536,heads=16,kv_heads=8,head_dim=256", 1),
        ("q_tokens=9,seqs=9,max_q=1,max_ctx=99,total_ctx=99,heads=8,kv_heads=2,kv=fp8,kv_scale=head", 1),
        ("q_tokens=16,seqs=16,max_q=1,max_ctx=999,total_ctx=9999,heads=16,kv_heads=8,softcap=true", 1),
        ("q_tokens=512,seqs=1,max_q=512,max_ctx=512,total_ctx=512,heads=32,kv_heads=8", 1),
        ("q_tokens=512,seqs=1,max_q=512,max_ctx=512,total_ctx=512,heads=32,kv_heads=8,head_dim=64", 2),
        ("q_tokens=2,seqs=2,max_q=1,max_ctx=1024,total_ctx=2048,heads=64,kv_heads=1", None),
    ],
)
def test_tuning_tries_what_the_kernel_that_runs_reads(text: str, configurations: int | None) -> None:
    """Tiles of Triton's kernel, None, where that one does; four warps of a CTA or eight in decodes of heads of 64 and 128, without codes and soft
    cap."""
    problem = OP.problem(text)
    assert SPLIT.space is not None
    tried = list(SPLIT.space(problem, HOPPER))
    assert SPLIT.config(problem, HOPPER) in tried and len({str(one) for one in tried}) == len(tried)
    assert len(tried) == (configurations or len(list(triton.split_space(problem, HOPPER))))


@pytest.mark.parametrize(
    ("seqs", "kv_heads", "other"),
    [
        (16, 8, 4),  # 128 pairs
        (62, 2, 4),  # 124
        (61, 2, 8),  # 122 of 132 multiprocessors
        (17, 8, 8),  # 136
        (1, 8, 4),
        (2, 8, 8),
    ],
)
def test_tuning_tries_the_warps_that_the_entry_does_not_take(seqs: int, kv_heads: int, other: int) -> None:
    shape = f"max_q=1,max_ctx=999,total_ctx={seqs * 999},heads={2 * kv_heads},kv_heads={kv_heads}"
    problem = OP.problem(f"q_tokens={seqs},seqs={seqs},{shape}")
    assert SPLIT.space is not None
    assert [one["cta_warps"] for one in SPLIT.space(problem, HOPPER)] == [0, other]


def test_ranks() -> None:
    """The split pair ranks above Triton's, and the batch-invariant kernel above Triton's batch-invariant one."""
    ranks = {kernel.name: kernel.priority for kernel in (*KERNELS, *triton.KERNELS)}
    assert ranks["paged_attention_sm90_split"] > ranks["paged_attention_triton_split"]
    assert (
        ranks["paged_attention_triton_split"]
        > ranks["paged_attention_sm90"]
        > ranks["paged_attention_triton"]
    )
    assert ONE.batch_invariant and not SPLIT.batch_invariant


LIBRARY = library_dir() / "libgristmill_cuda_sm90a.so"


OPTIONS = {
    "ctas": 132,
    "part_tiles": 16,
    "reading": 10,
    "prompt_rows": 192,
    "cta_warps": 4,
    **launchers.PLACES,
}


def asked(
    entry: CallEntry,
    head_dim: int,
    codes: bool = False,
    group: int = 4,
    page: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    **changes: Any,
) -> int:
    """Returns the bytes of shared memory of a CTA, which the entry says without a device, or a negative code."""
    q = torch.empty(8, 2 * group, head_dim, dtype=dtype)
    cache = torch.empty(9, page, 2, head_dim, dtype=torch.float8_e4m3fn if codes else dtype)
    scales = torch.ones(1, 1, 2) if codes else None
    lengths = (torch.zeros(2, 9).int(), torch.zeros(3).int(), torch.zeros(2).int())
    given = {"k_scale": scales, "v_scale": scales, "out": q} | changes
    return entry.ask(OPTIONS, OP.Call(q, cache, cache, *lengths, 1, 100, 1.0, **given))


def shared_memory(decode: bool, codes: bool, head_dim: int, **changes: Any) -> int:
    """The same of the kernel for few rows, or of the one for any batch."""
    return asked(launchers.DECODE if decode else launchers.ENTRY, head_dim, codes, **changes)


@pytest.mark.skipif(not LIBRARY.is_file(), reason="needs the CUDA library")
@pytest.mark.parametrize("codes", [False, True])
def test_shared_memory_fits(codes: bool) -> None:
    """Two CTAs of the kernel for decode fit in a multiprocessor with heads of up to 128, else one, and one of the kernel for any
    batch."""
    for head_dim in DECODE_HEAD_DIMS:
        assert 0 < shared_memory(True, codes, head_dim) <= (115_712 if head_dim <= 128 else 232_448) - 256
    for head_dim in range(16, 129, 16):
        assert 0 < shared_memory(False, codes, head_dim) <= 232_448


@pytest.mark.skipif(not LIBRARY.is_file(), reason="needs the CUDA library")
@pytest.mark.parametrize("decode", [True, False])
def test_entries_refuse_what_they_were_not_built_for(decode: bool) -> None:
    dtype, shape, argument = -1, -2, -5
    assert shared_memory(decode, True, 128, v_scale=None) == argument
    assert shared_memory(decode, True, 128, k_scale=None) == argument
    assert shared_memory(decode, False, 128, dtype=torch.float32) == dtype
    assert shared_memory(decode, True, 72) == shape
    assert shared_memory(decode, False, 320) == shape
    assert shared_memory(decode, False, 128, group=129) == argument


@pytest.mark.skipif(not LIBRARY.is_file(), reason="needs the CUDA library")
def test_the_kernel_for_wide_heads_says_what_it_takes() -> None:
    """Its shared memory fits, and other heads, pages, codes and dtypes are refused."""

    def wide(head_dim: int = 256, **changes: Any) -> int:
        return asked(launchers.ENTRY, head_dim, **changes)

    dtype, shape, argument = -1, -2, -5
    assert all(0 < wide(head_dim) <= 232_448 for head_dim in (136, 192, 256))
    assert wide(264) == wide(252) == wide(page=7) == wide(codes=True) == shape
    assert wide(group=129) == argument and wide(dtype=torch.float32) == dtype
