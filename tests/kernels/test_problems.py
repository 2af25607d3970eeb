"""Arguments can be made for every problem that an operation accepts. Otherwise a mistyped problem would count
against the kernels tried on it."""

from __future__ import annotations

import random

import pytest

from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import AxisError, AxisValue
from gristmill.kernel_registry.registry import default_registry

REGISTRY = default_registry()
SCHEMES = (
    "bf16",
    "fp32",
    "int4_g128",
    "int4_g32_zp",
    "int4_ch",
    "int8_g64",
    "int8_ch",
    "fp8",
    "fp8_block",
    "mxfp4",
    "mxfp8",
    "nvfp4",
)


def changed(op: Op, draw: random.Random) -> dict[str, AxisValue | None]:
    """Returns an example of `op` with one or two of its axes changed to values that need not fit the others."""
    values = dict(op.problem(draw.choice(op.examples)).values)
    for axis in draw.sample(op.axes, draw.randint(1, 2)):
        if axis.kind == "int":
            values[axis.name] = max(axis.minimum, draw.choice([0, 1, 2, 3, 5, 7, 16, 33, 64, 100]))
        elif axis.kind == "bool":
            values[axis.name] = draw.random() < 0.5
        elif axis.kind == "scheme":
            values[axis.name] = draw.choice(SCHEMES)
        elif axis.kind in ("dtype", "choice"):
            values[axis.name] = draw.choice(axis.choices)
    return values


@pytest.mark.parametrize("op", REGISTRY.ops.values(), ids=lambda op: op.name)
def test_accepted_problems_have_arguments_that_describe_them(op: Op) -> None:
    draw, accepted = random.Random(17), 0
    for _ in range(40):
        values = changed(op, draw)
        try:
            problem = op.problem(values)
        except AxisError:
            continue
        accepted += 1
        described = op.describe(*op.inputs(problem, 3, "cpu"))
        assert op.static(described) == op.static(problem), problem
    assert accepted > 10


@pytest.mark.parametrize(
    ("op", "text", "words"),
    [
        (
            "linear",
            "n=7,k=64,epilogue=silu_mul",
            "silu_mul needs an even number of rows .gate, then up., got n=7",
        ),
        (
            "linear",
            "n=8,k=64,w=int8_ch,act_order=true",
            "act_order orders groups of columns, and int8_ch has none",
        ),
        ("linear", "n=8,k=1,w=int4_g32,act_order=true", "at least 2 columns to order, got k=1"),
        ("grouped_linear", "m=4,e=2,n=9,k=8,epilogue=silu_mul", "even number of rows"),
        (
            "moe",
            "m=4,top_k=1,e=2,h=8,i=8,act_order=true",
            "act_order orders groups of columns, and bf16 has none",
        ),
        ("grouped_topk", "m=1,e=10,top_k=2,n_group=4", "n_group 4 does not divide 10 experts"),
        ("grouped_topk", "m=1,e=8,top_k=3,n_group=4,topk_group=1", "top_k must be 1 to 2"),
        (
            "rotary_embedding",
            "t=1,hq=2,hk=1,d=64,rot=33",
            "rot must be even, at least 2 and at most the head size 64, got 33",
        ),
        ("paged_attention", "heads=6,kv_heads=4", "6 query heads do not divide among 4 KV heads"),
        (
            "varlen_attention",
            "q_tokens=9,seqs=2,max_q=4,max_ctx=9,total_ctx=9,heads=2,kv_heads=1",
            "9 new tokens do not fit in 2 sequences of at most 4",
        ),
    ],
)
def test_values_that_do_not_go_together_are_refused_by_name(op: str, text: str, words: str) -> None:
    with pytest.raises(AxisError, match=words):
        REGISTRY.op(op).problem(text)
