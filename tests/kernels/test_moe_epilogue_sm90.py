"""moe_epilogue_sm90 without a GPU: accepted problems, and its chain with the products and steps of Hopper replaced by references."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels import interpreter
from gristmill.kernels.moe import steps_sm90 as moe_steps_sm90
from gristmill.kernels.moe.combine import op as combine
from gristmill.kernels.moe.grouped_linear import op as grouped_linear
from gristmill.kernels.moe.grouped_linear.frag16_sm90 import _launch, shapes
from gristmill.kernels.moe.moe import epilogue_sm90 as moe_epilogue_sm90
from gristmill.kernels.moe.moe import op as moe
from gristmill.kernels.moe.permute import op as permute
from tests.calls import make_call, positional
from tests.conftest import HAS_GPU

OP, TARGET = default_registry().op("moe"), Target.parse("sm_90")
KERNEL = default_registry().kernel("moe", "moe_epilogue_sm90")


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("m=1,top_k=4,e=128,h=2880,i=2880,w=mxfp4,epilogue=w13_bias+w2_bias+clamp", None),
        ("m=1,top_k=2,e=4,h=256,i=264,x=fp16,w=int4_ch,epilogue=w2_bias", None),
        ("m=1,top_k=2,e=4,h=256,i=256,w=mxfp4", "moe_sm90 is faster without"),
        ("m=1,top_k=2,e=4,h=256,i=256,w=nvfp4,epilogue=clamp", "compiled for int4_g128"),
        ("m=1,top_k=2,e=4,h=256,i=252,w=mxfp4,epilogue=clamp", "not a multiple of 8"),
        ("m=1,top_k=2,e=4,h=256,i=256,w=int4_g128,act_order=true,epilogue=clamp", "act-order"),
    ],
)
def test_accepts(problem: str, reason: str | None) -> None:
    refusal = KERNEL.accepts(OP.problem(problem))
    assert refusal is None if reason is None else refusal is not None and reason in refusal


@pytest.mark.parametrize("m", [0, 1, 16, 257, 4096])
def test_a_default_is_compiled_for_its_products(m: int) -> None:
    config = KERNEL.config(OP.problem(f"m={m},top_k=4,e=32,h=2880,i=2880,w=mxfp4,epilogue=clamp"), TARGET)
    for number in (1, 2):
        shape = shapes.Shape(*(config[f"{name}{number}"] for name in shapes.Shape._fields))
        assert shape in shapes.shapes_for(2880, False) and config[f"grid{number}"] == 132 * shape.ctas


def _product(
    config: Any,
    x: torch.Tensor,
    weight: list[torch.Tensor],
    offsets: torch.Tensor,
    permutation: torch.Tensor | None,
    top_k: int,
    silu_mul: bool,
    out: torch.Tensor,
    *,
    early: bool,
    clear: bool,
) -> None:
    """As the library's: rows past the last expert's stay as they are."""
    assert {"format", "tile_bytes", *_launch.SHAPE} <= {*config} and not silu_mul and not clear
    used = int(offsets[-1])
    places = torch.arange(used, dtype=torch.int32) if permutation is None else permutation[:used]
    out[:used] = grouped_linear.reference(x, weight, offsets, places, top_k)


def _gather_rows(
    x: torch.Tensor, permutation: torch.Tensor, offsets: torch.Tensor, top_k: int, out: torch.Tensor
) -> None:
    used = int(offsets[-1])
    out[:used] = x[permutation[:used].long() // top_k]


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    @positional
    def placed(config: Any, ids: torch.Tensor, experts: int, *outs: torch.Tensor) -> None:
        for out, result in zip(outs, permute.reference(ids, experts), strict=True):
            out.copy_(result)

    interpreter.install()
    monkeypatch.setattr(_launch, "product", _product)
    monkeypatch.setattr(moe_steps_sm90, "permute", placed)
    monkeypatch.setattr(moe_steps_sm90, "gather_rows", _gather_rows)
    monkeypatch.setattr(
        moe_steps_sm90,
        "combine",
        lambda _, call: call.out.copy_(combine.reference(call.y, call.inverse, call.weights)),
    )


PROBLEMS = [
    "m=7,top_k=3,e=5,h=96,i=72,w=mxfp4,epilogue=w13_bias+w2_bias+clamp",
    "m=33,top_k=2,e=4,h=40,i=1032,w=mxfp4,epilogue=w13_bias+w2_bias+clamp",
    "m=1,top_k=2,e=1,h=1032,i=8,x=fp16,w=mxfp4,epilogue=w2_bias",
    "m=9,top_k=4,e=6,h=32,i=40,w=mxfp4,epilogue=clamp",
    "m=5,top_k=2,e=3,h=64,i=64,w=mxfp4,epilogue=w13_bias",
    "m=0,top_k=2,e=3,h=64,i=64,w=mxfp4,epilogue=w13_bias",
]


def _run(problem: Any, arguments: list[Any]) -> torch.Tensor:
    given, out = list(arguments), torch.full_like(arguments[0], float("nan"))
    given[3:5] = [[w.dequantize()] for w in arguments[3:5]]
    config = KERNEL.config(problem, TARGET)
    given[6] = torch.full((KERNEL.workspace(problem, config).bytes,), 255, dtype=torch.uint8)  # NaN
    moe_epilogue_sm90.launch(config, make_call("moe", *given, out))
    return out


@pytest.mark.skipif(HAS_GPU, reason="Triton's interpreter is for machines without a GPU")
@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("text", PROBLEMS)
def test_chain_of_references(text: str) -> None:
    """In a workspace of exactly its size, full of NaN; ids of other ranks among them."""
    problem = OP.problem(text)
    assert KERNEL.accepts(problem) is None
    arguments = OP.inputs(problem, 3, "cpu")
    error = moe.error(problem, arguments, [_run(problem, arguments)], [moe.reference(*arguments)])
    assert error <= OP.tolerance(problem).limit


@pytest.mark.skipif(HAS_GPU, reason="Triton's interpreter is for machines without a GPU")
@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize(
    ("place", "value"),
    [(7, None), (8, None), (7, "rolled"), (8, "rolled"), (9, False), (10, 1.0), (11, 1e30)],
    ids=["no w13_bias", "no w2_bias", "w13_bias rolled", "w2_bias rolled", "silu", "alpha", "not clamped"],
)
def test_each_argument_counts(place: int, value: Any) -> None:
    """Planted faults: the kernel runs with one argument changed."""
    problem = OP.problem("m=24,top_k=2,e=4,h=64,i=64,w=mxfp4,epilogue=w13_bias+w2_bias+clamp")
    arguments = OP.inputs(problem, 4, "cpu")
    wrong = list(arguments)
    wrong[place] = arguments[place].roll(1, 0) if value == "rolled" else value
    error = moe.error(problem, arguments, [_run(problem, wrong)], [moe.reference(*arguments)])
    assert error > 1.5 * OP.tolerance(problem).limit


def test_refuses_a_workspace_that_is_too_small() -> None:
    problem = OP.problem(PROBLEMS[0])
    config, arguments = KERNEL.config(problem, TARGET), OP.inputs(problem, 3, "cpu")
    arguments[3:5] = [[w.dequantize()] for w in arguments[3:5]]
    arguments[6] = torch.empty(KERNEL.workspace(problem, config).bytes - 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match="workspace must be"):
        moe_epilogue_sm90.launch(config, make_call("moe", *arguments, torch.empty_like(arguments[0])))
