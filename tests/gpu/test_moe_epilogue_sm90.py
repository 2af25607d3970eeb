"""moe_epilogue_sm90 on Hopper: biases and the clamped activation against the reference, faults, repetitions, graphs with other ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gristmill.autotune.captures import capturing
from gristmill.autotune.device import device_target
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.problem import Problem
from gristmill.kernels.moe.moe import epilogue_sm90 as moe_epilogue_sm90
from gristmill.kernels.moe.moe import op as moe
from tests.calls import make_call
from tests.gpu.test_moe_sm90 import DEFAULTS, DEVICE, HOPPER, ROUTINGS, layer, packed, routing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (sm_90)")]
EPILOGUE = "w13_bias+w2_bias+clamp"
HIDDEN, EXPERTS, TOP_K = 256, 6, 3


def call_of(
    kind: str, tokens: int, scheme: str, inner: int, epilogue: str = EPILOGUE
) -> tuple[Problem, list[Any]]:
    """A problem and its arguments, with weights that are not packed. About a third of gates and ups are clamped."""
    generator = torch.Generator(DEVICE).manual_seed(tokens)
    flags = epilogue.split("+")
    first, second = layer(scheme, EXPERTS, HIDDEN, inner)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, generator=generator).bfloat16()

    problem = moe.OP.problem(
        f"m={tokens},top_k={TOP_K},e={EXPERTS},h={HIDDEN},i={inner},w={scheme},epilogue={epilogue}"
    )
    scores = torch.rand(tokens, TOP_K, device=DEVICE, generator=generator) + 0.1
    return problem, [
        normal(tokens, HIDDEN),
        scores,
        routing(kind, tokens, TOP_K, EXPERTS),
        first,
        second,
        inner,
        None,
        normal(EXPERTS, 2 * inner) if "w13_bias" in flags else None,
        normal(EXPERTS, HIDDEN) if "w2_bias" in flags else None,
        "clamp" in flags,
        1.702,
        1.5,
    ]


def space_of(problem: Problem) -> torch.Tensor:
    """A workspace of exactly the size that is asked for, full of NaN."""
    size = moe_epilogue_sm90.workspace(problem, {}).bytes
    return torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)


def run(problem: Problem, arguments: list[Any], space: torch.Tensor | None = None) -> torch.Tensor:
    config = moe_epilogue_sm90.config(problem, device_target(DEVICE, Policy()))
    given, out = list(arguments), torch.full_like(arguments[0], float("nan"))
    given[3:5] = [packed(weight) for weight in arguments[3:5]]
    given[6] = space
    moe_epilogue_sm90.launch(config, make_call("moe", *given, out))
    return out


@pytest.mark.parametrize("tokens", [1, 7, 22, 257])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_against_the_reference(kind: str, tokens: int) -> None:
    for scheme, inner, epilogue in (
        ("mxfp4", 288, EPILOGUE),
        ("int4_g128", 256, "w13_bias"),
        ("int4_ch", 200, "w2_bias+clamp"),
    ):
        problem, arguments = call_of(kind, tokens, scheme, inner, epilogue)
        out = run(problem, arguments, space_of(problem))
        error = moe.error(problem, [*arguments, *DEFAULTS], [out], [moe.reference(*arguments)])
        assert error <= moe.OP.tolerance(problem).limit, (scheme, epilogue)


@pytest.mark.parametrize(
    ("place", "value"),
    [(7, "zero"), (7, "rolled"), (8, "zero"), (8, "rolled"), (10, 1.0), (11, 1e30)],
    ids=["no w13_bias", "w13_bias rolled", "no w2_bias", "w2_bias rolled", "alpha", "not clamped"],
)
def test_faults_are_seen(place: int, value: Any) -> None:
    problem, arguments = call_of("skewed", 64, "mxfp4", 256)
    wrong = list(arguments)
    if isinstance(value, str):
        value = arguments[place].roll(1, 0) if value == "rolled" else torch.zeros_like(arguments[place])
    wrong[place] = value
    error = moe.error(problem, [*arguments, *DEFAULTS], [run(problem, wrong)], [moe.reference(*arguments)])
    assert error > 1.5 * moe.OP.tolerance(problem).limit


def test_a_hundred_launches_give_the_same_bits() -> None:
    for tokens in (2, 40, 600):
        problem, arguments = call_of("skewed", tokens, "mxfp4", 256)
        space = space_of(problem)
        expected = run(problem, arguments, space)
        assert all(torch.equal(run(problem, arguments, space), expected) for _ in range(100))


def test_a_graph_takes_other_ids() -> None:
    """On both sides of the number of entries up to which the first product gathers rows by itself."""
    for tokens in (9, 50):
        problem, arguments = call_of("all to one", tokens, "mxfp4", 256)
        config = moe_epilogue_sm90.config(problem, device_target(DEVICE, Policy()))
        given, out = list(arguments), torch.empty_like(arguments[0])
        given[3:5] = [packed(weight) for weight in arguments[3:5]]
        given[6] = space_of(problem)
        moe_epilogue_sm90.launch(config, make_call("moe", *given, out))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            moe_epilogue_sm90.launch(config, make_call("moe", *given, out))
        for kind in ROUTINGS:
            arguments[2].copy_(routing(kind, tokens, TOP_K, EXPERTS))
            graph.replay()
            assert torch.equal(out, run(problem, arguments)), kind
