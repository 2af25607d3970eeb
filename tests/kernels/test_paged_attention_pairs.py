"""Paged attention with every pair of values of any two features, on every kernel that runs here."""

from __future__ import annotations

import math
import random
from itertools import combinations

import pytest
import torch

from gristmill.autotune.metrics import error_of
from gristmill.autotune.verify import run_reference
from gristmill.kernels.attention.paged_attention.op import OP
from tests.kernels.running import Runnable, runnables

BATCHES = {
    "decode": "q_tokens=4,seqs=4,max_q=1,max_ctx=90,total_ctx=170",
    "mixed": "q_tokens=9,seqs=4,max_q=6,max_ctx=70,total_ctx=140",
    "prefill": "q_tokens=21,seqs=1,max_q=21,max_ctx=21,total_ctx=21",
}
FEATURES: dict[str, list[str]] = {
    "batch": [*BATCHES],
    "heads": ["heads=2,kv_heads=2", "heads=6,kv_heads=2", "heads=8,kv_heads=1"],
    "head_dim": ["head_dim=64", "head_dim=80", "head_dim=128"],
    "block_size": ["block_size=1", "block_size=7", "block_size=16", "block_size=64"],
    "x": ["x=bf16", "x=fp16", "x=fp32"],
    "kv": ["kv=x", "kv=fp8,kv_scale=head", "kv=fp8,kv_scale=token"],
    "window": ["window=0", "window=5", "window=40"],
    "sinks": ["sinks=false", "sinks=true"],
    "lse": ["lse=false", "lse=true"],
    "softcap": ["softcap=false", "softcap=true"],
}
Row = tuple[str, ...]


def pairs_of(row: Row) -> set[tuple[str, str]]:
    """Returns the pairs of values in a problem."""
    return set(combinations(row, 2))


def covering() -> list[Row]:
    """Returns few problems that together have every pair: each is the best of some random candidates."""
    draw, names = random.Random(0), [*FEATURES]
    missing = {
        (a, b) for one, other in combinations(names, 2) for a in FEATURES[one] for b in FEATURES[other]
    }
    rows: list[Row] = []
    while missing:
        candidates = [tuple(draw.choice(values) for values in FEATURES.values()) for _ in range(60)]
        best = max(candidates, key=lambda row: len(pairs_of(row) & missing))
        missing -= pairs_of(best)
        rows.append(best)
    return rows


ROWS = covering()


def text_of(row: Row) -> str:
    """Returns the text of the problem that a row describes."""
    return ",".join((BATCHES[row[0]], *row[1:]))


@pytest.mark.parametrize("row", ROWS, ids=",".join)
@pytest.mark.parametrize("kernel", runnables("paged_attention"), ids=str)
def test_features_in_pairs(kernel: Runnable, row: Row) -> None:
    problem = OP.problem(text_of(row))
    assert kernel.kernel.accepts(problem) is None
    arguments = OP.inputs(problem, 2, "cpu")
    lse = arguments[[parameter.name for parameter in OP.parameters].index("lse")]
    out = torch.full(arguments[0].shape, math.nan, dtype=arguments[0].dtype)
    kernel(*arguments, out)
    outputs = [out] if lse is None else [out, lse]
    assert (
        error_of(OP, problem, arguments, outputs, run_reference(OP, arguments)) <= OP.tolerance(problem).limit
    )


def test_the_problems_have_every_pair() -> None:
    """Each problem adds at least one pair, and together they have all."""
    covered: set[tuple[str, str]] = set()
    for row in ROWS:
        assert pairs_of(row) - covered
        covered |= pairs_of(row)
    values = [len(values) for values in FEATURES.values()]
    assert len(covered) == sum(a * b for a, b in combinations(values, 2)) and len(ROWS) < 30
