"""Batch invariance on a GPU: rows of linear and of experts have the same bits for every M, and so have requests of whole models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gristmill.autotune.device import device_target
from gristmill.autotune.verify import kernel_arguments, run_guarded
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from tests.runtime.oracle import DEEPSEEK, LLAMA
from tests.runtime.test_batch_invariance import check_model

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
FULL = 1000
PARTS = (
    (0, 1),
    (999, 1000),
    (1, 3),
    (5, 12),
    (3, 20),
    (64, 128),
    (100, 165),
    (0, 257),
    (300, 700),
    (0, 1000),
)
"""On both sides of the bounds of all tiles (16, 64, 128 and 256 rows), at any place in them."""
LINEAR = [
    f"n={n},k={k},x={x},w={w},epilogue={epilogue}"
    for n, k in ((384, 512), (520, 4352))
    for x in ("bf16", "fp16")
    for w, epilogue in (
        (x, "none"),
        (x, "silu_mul"),
        ("int4_g128", "none"),
        ("int4_g128", "silu_mul"),
        ("int4_g32_zp", "bias"),
        ("mxfp4", "none"),
        ("nvfp4", "residual"),
        ("int8_ch", "none"),
        ("fp8_block", "none"),
    )
] + ["n=64,k=257,x=fp32,w=fp32"]
MOE = [f"top_k=4,e=8,h=256,i=384,w={w}" for w in ("bf16", "int4_g128", "mxfp4")]


def kernels(op: str, problem: Problem) -> list[Kernel]:
    """The kernels of an operation that declare batch invariance and run this problem here."""
    target = device_target(DEVICE, Policy())
    return [
        kernel
        for kernel in default_registry().kernels_of(op)
        if kernel.batch_invariant
        and not kernel.requires.check_hardware(target)
        and kernel.accepts(problem) is None
    ]


def rows(
    op: str, kernel: Kernel, problem: Problem, arguments: list[Any], start: int, end: int, **changed: Any
) -> torch.Tensor:
    """The result for rows start .. end alone, in a poisoned output, with the default configuration for their number."""
    definition = default_registry().op(op)
    part = problem.with_values(m=end - start)
    own = [
        a[start:end].contiguous() if isinstance(a, torch.Tensor) and a.dim() and len(a) == FULL else a
        for a in arguments
    ]
    config = dict(kernel.config(part, device_target(DEVICE, Policy()))) | changed
    return run_guarded(definition, kernel, config, kernel_arguments(definition, kernel, own))[0][0]


@pytest.mark.parametrize(
    ("op", "text"), [*(("linear", text) for text in LINEAR), *(("moe", text) for text in MOE)]
)
def test_rows_have_the_same_bits_for_every_m(op: str, text: str) -> None:
    problem = default_registry().op(op).problem(f"m={FULL},{text}")
    arguments = list(default_registry().op(op).inputs(problem, 0, DEVICE))
    found = kernels(op, problem)
    assert found
    for kernel in found:
        whole = rows(op, kernel, problem, arguments, 0, FULL)
        assert bool(whole.isfinite().all())
        for start, end in PARTS:
            part = rows(op, kernel, problem, arguments, start, end)
            assert torch.equal(part, whole[start:end]), f"{kernel.name}: rows {start} to {end} alone"


def test_another_order_of_additions_is_seen() -> None:
    """With the sums along K split in another way some rows differ: the comparison is sharp enough."""
    problem = default_registry().op("linear").problem(f"m={FULL},n=384,k=4096,w=int4_g128")
    arguments = list(default_registry().op("linear").inputs(problem, 0, DEVICE))
    kernel = default_registry().kernel("linear", "linear_w4a16_invariant_sm90")
    if kernel not in kernels("linear", problem):
        pytest.skip("needs a Hopper GPU (sm_90)")
    whole = rows("linear", kernel, problem, arguments, 0, FULL)
    other = rows("linear", kernel, problem, arguments, 0, 64, split=2)
    assert not torch.equal(other, whole[:64])


ATTENTION = [
    f"q_tokens=600,seqs=1,max_q=600,max_ctx=1100,total_ctx=1100,heads={heads},kv_heads={kv_heads},head_dim={dim},{more}"
    for heads, kv_heads, dim, more in (
        (8, 2, 128, "x=bf16"),
        (4, 4, 64, "x=fp16,sinks=true"),
        (6, 2, 128, "x=bf16,window=300,block_size=7"),
        (16, 1, 128, "x=bf16,softcap=true"),
        (8, 2, 128, "x=bf16,kv=fp8,kv_scale=head"),
        (8, 2, 64, "x=fp16,kv=fp8,kv_scale=token"),
        (8, 2, 256, "x=bf16"),
        (4, 2, 192, "x=fp16,window=200,sinks=true"),
    )
]
CHUNKS = (1, 2, 15, 16, 17, 64, 100, 300)


def attention_rows(
    kernel: Kernel, problem: Problem, arguments: list[Any], start: int, end: int, **changed: Any
) -> torch.Tensor:
    """The result for queries start .. end of the one sequence alone: the context ends with the last of them."""
    definition = default_registry().op("paged_attention")
    count, context = end - start, int(arguments[5][0]) - (int(arguments[4][-1]) - end)
    own = list(arguments)
    own[0] = arguments[0][start:end].contiguous()
    own[4] = torch.tensor([0, count], dtype=torch.int32, device=DEVICE)
    own[5] = torch.tensor([context], dtype=torch.int32, device=DEVICE)
    own[6], own[7], own[11] = count, context, None
    part = problem.with_values(q_tokens=count, max_q=count, max_ctx=context, total_ctx=context)
    config = dict(kernel.config(part, device_target(DEVICE, Policy()))) | changed
    return run_guarded(definition, kernel, config, kernel_arguments(definition, kernel, own))[0][0]


@pytest.mark.parametrize("text", ATTENTION)
def test_rows_of_attention_have_the_same_bits_in_every_chunk(text: str) -> None:
    problem = default_registry().op("paged_attention").problem(text)
    arguments = list(default_registry().op("paged_attention").inputs(problem, 0, DEVICE))
    found = kernels("paged_attention", problem)
    assert found
    for kernel in found:
        whole = attention_rows(kernel, problem, arguments, 0, 600)
        assert bool(whole.isfinite().all())
        for chunk in CHUNKS:
            for start in (0, 200, 600 - chunk):
                part = attention_rows(kernel, problem, arguments, start, start + chunk)
                assert torch.equal(part, whole[start : start + chunk]), (
                    f"{kernel.name}: queries {start} to {start + chunk} alone"
                )


def test_keys_that_warpgroups_share_are_seen() -> None:
    """With the keys of a few queries shared by two warpgroups their rows differ: the comparison is sharp enough."""
    problem = default_registry().op("paged_attention").problem(ATTENTION[0])
    kernel = default_registry().kernel("paged_attention", "paged_attention_sm90")
    if kernel not in kernels("paged_attention", problem):
        pytest.skip("needs a Hopper GPU (sm_90)")
    arguments = list(default_registry().op("paged_attention").inputs(problem, 0, DEVICE))
    whole = attention_rows(kernel, problem, arguments, 0, 600)
    assert not torch.equal(
        attention_rows(kernel, problem, arguments, 300, 310, part_tiles=16), whole[300:310]
    )


@pytest.mark.parametrize("options", [{"dtype": "bf16"}, {"dtype": "bf16", "quant": "int4_g128"}], ids=str)
@pytest.mark.parametrize("model", [LLAMA, DEEPSEEK])
def test_requests_have_the_same_bits_in_every_batch(model: str, options: dict[str, Any]) -> None:
    check_model(model, 12, 150, device="cuda", **options)
