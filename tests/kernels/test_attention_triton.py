"""The Triton attention kernels in the interpreter: batch invariance, split contexts, workspaces, tiles."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gristmill.autotune.metrics import error_of
from gristmill.autotune.verify import run_reference
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.attention.mla_attention import op as mla_attention
from gristmill.kernels.attention.paged_attention import op as paged_attention
from gristmill.kernels.attention.tiles import packing, part_length, split_count, tile_bound
from gristmill.kernels.load import load
from tests.calls import make_call
from tests.conftest import HAS_GPU

pytestmark = pytest.mark.skipif(HAS_GPU, reason="with a GPU here Triton kernels run on it, in the gpu tests")
REGISTRY = default_registry()
SMALL = Target.parse("sm_90")


def run(
    op: Op, name: str, text: str, *, workspace: torch.Tensor | None = None, a: list[Any] | None = None
) -> tuple[Any, Any]:
    """Runs a kernel on the problem `text`, or on the arguments `a`. Returns (arguments, outputs)."""
    kernel, problem = REGISTRY.kernel(op.name, name), op.problem(text)
    a = list(op.inputs(problem, 0, "cpu") if a is None else a)
    names = [parameter.name for parameter in op.parameters]
    if workspace is not None:
        a[names.index("workspace")] = workspace
    lse = names.index("lse")
    if a[lse] is not None:
        a[lse] = torch.full_like(a[lse], math.nan)
    shape, dtype = op.like(*a)[0]
    out = torch.full(shape, math.nan, dtype=dtype)
    load(kernel)(kernel.config(problem, SMALL), make_call(kernel.op, *a, out))
    return a, [out] if a[lse] is None else [out, a[lse]]


SPLITS = [
    (paged_attention.OP, "paged_attention_triton_split", "max_q=1,heads=4,kv_heads=2,head_dim=48,sinks=true"),
    (paged_attention.OP, "paged_attention_triton_split", "max_q=2,heads=6,kv_heads=2,head_dim=32,window=550"),
    (mla_attention.OP, "mla_attention_triton_split", "max_q=2,heads=18,latent_dim=32,rope_dim=16"),
]


@pytest.mark.parametrize(("op", "name", "static"), SPLITS, ids=lambda x: getattr(x, "name", x))
def test_split_contexts(op: Op, name: str, static: str) -> None:
    """Some parts are empty for the shorter sequences; a poisoned workspace of exactly the stated size is
    enough."""
    text = f"q_tokens=3,seqs=3,max_ctx=1030,total_ctx=1800,x=fp32,lse=true,{static}"
    problem, kernel = op.problem(text), REGISTRY.kernel(op.name, name)
    size = kernel.workspace(problem, kernel.config(problem, SMALL)).bytes
    memory = torch.full((size + 512,), 255, dtype=torch.uint8)
    a, actual = run(op, name, text, workspace=memory[256 : 256 + size])
    assert error_of(op, problem, a, actual, run_reference(op, a)) <= op.tolerance(problem).limit
    assert (memory[:256] == 255).all() and (memory[256 + size :] == 255).all()
    assert (memory[256 : 256 + size] != 255).any(), "the workspace was not used: contexts were not split"
    with pytest.raises(ValueError, match="workspace of"):
        run(op, name, text, workspace=torch.empty(64, dtype=torch.uint8))


INVARIANT = [
    (paged_attention.OP, "paged_attention_triton", "heads=6,kv_heads=2,head_dim=48,sinks=true,window=90"),
    (paged_attention.OP, "paged_attention_triton", "heads=2,kv_heads=1,x=fp16,kv=fp8,kv_scale=token"),
    (mla_attention.OP, "mla_attention_triton", "heads=5,latent_dim=32,rope_dim=16"),
]


@pytest.mark.parametrize(("op", "name", "static"), INVARIANT, ids=lambda x: getattr(x, "name", x))
def test_results_do_not_depend_on_the_batch_or_on_chunks(op: Op, name: str, static: str) -> None:
    text = f"q_tokens=15,seqs=3,max_q=11,max_ctx=150,total_ctx=350,lse=true,{static}"
    assert REGISTRY.kernel(op.name, name).batch_invariant
    a, (out, lse) = run(op, name, text)
    named = dict(zip([parameter.name for parameter in op.parameters], a, strict=True))
    begin = named["query_start"].tolist()
    for i in range(3):
        count = begin[i + 1] - begin[i]
        for first, last in {(0, count), (0, min(5, count)), (max(0, count - 3), count)}:
            if first == last:
                continue
            rows = slice(begin[i] + first, begin[i] + last)
            single = named | {
                "q": named["q"][rows],
                "lse": named["lse"][rows],
                "block_table": named["block_table"][i : i + 1],
                "seq_lens": named["seq_lens"][i : i + 1] - (count - last),
                "max_q": last - first,
                "query_start": torch.tensor([0, last - first], dtype=torch.int32),
            }
            _, (one, stated) = run(op, name, text, a=list(single.values()))
            assert torch.equal(one, out[rows]) and torch.equal(stated, lse[rows])


def test_blocks_behind_the_window_are_not_followed() -> None:
    op, text = (
        paged_attention.OP,
        "q_tokens=3,seqs=3,max_q=1,max_ctx=90,total_ctx=250,heads=2,kv_heads=1,head_dim=32,window=20",
    )
    a = op.inputs(op.problem(text), 0, "cpu")
    expected = run_reference(op, a)
    for i, context in enumerate(a[5].tolist()):
        freed = max(0, context - 20) // 16
        a[1][a[3][i, :freed].long()] = math.nan
        a[3][i, :freed] = 0
    for name in ("paged_attention_triton", "paged_attention_triton_split"):
        _, actual = run(op, name, text, a=a)
        assert error_of(op, op.problem(text), a, actual, expected) <= op.tolerance(op.problem(text)).limit


@pytest.mark.parametrize("counts", [[0], [1, 1, 1], [0, 5, 0, 64, 1], [33, 0, 31, 16, 17], [7] * 9])
@pytest.mark.parametrize("tile", [1, 2, 5, 16])
def test_every_query_has_one_tile(counts: list[int], tile: int) -> None:
    """The tiles of sequence i start at begin // tile + i: they never overlap, and the launched number covers
    them."""
    begin, owned = 0, []
    for index, count in enumerate(counts):
        first = begin // tile + index
        owned += range(first, first + -(-count // tile))
        begin += count
    assert len(owned) == len(set(owned)) and all(t < tile_bound(begin, len(counts), tile) for t in owned)


@pytest.mark.parametrize(("group", "rows"), [(1, 16), (3, 16), (16, 16), (20, 16), (128, 16), (7, 64)])
def test_packing_covers_every_head(group: int, rows: int) -> None:
    head_tiles, queries = packing(group, rows)
    heads = -(-group // head_tiles)
    assert head_tiles * heads >= group and queries >= 1 and heads * queries <= rows


@pytest.mark.parametrize("max_ctx", [1, 255, 256, 1000, 131072])
@pytest.mark.parametrize("programs", [1, 8, 1000])
def test_parts_cover_the_context(max_ctx: int, programs: int) -> None:
    splits = split_count(programs, 528, max_ctx)
    assert splits >= 1 and splits * part_length(max_ctx, splits, 32) >= max_ctx
    assert splits == 1 or (splits * 256 <= max_ctx and splits * programs <= 528)
