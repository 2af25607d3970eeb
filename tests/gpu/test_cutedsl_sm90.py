"""Experts in CuTe DSL for Hopper: every example in every configuration, tails and empty experts, bits that repeat, a captured graph."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from gristmill.autotune.captures import capturing
from gristmill.autotune.verify import verify
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.moe.grouped_linear import cutedsl as grouped
from tests.calls import make_call
from tests.conftest import HAS_GPU

HOPPER = HAS_GPU and torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)
INSTALLED = importlib.util.find_spec("cutlass") is not None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"),
    pytest.mark.skipif(not INSTALLED, reason="nvidia-cutlass-dsl is not installed"),
]
DEVICE, TARGET = "cuda:0", Target.parse("sm_90")
REGISTRY = default_registry()
OP = REGISTRY.op("grouped_linear")
EXAMPLES = [
    (REGISTRY.kernel(op, name), example)
    for op, name in (
        ("grouped_linear", "grouped_linear_cutedsl_sm90"),
        ("moe", "moe_cutedsl_sm90"),
    )
    for example in REGISTRY.kernel(op, name).examples
]


@pytest.mark.parametrize(("kernel", "example"), EXAMPLES, ids=lambda one: getattr(one, "name", one))
def test_every_configuration(kernel: Kernel, example: str) -> None:
    op = REGISTRY.op(kernel.op)
    problem = op.problem(example)
    configs = list(kernel.space(problem, TARGET)) if kernel.space else [kernel.config(problem, TARGET)]
    for config in configs:
        for ctas in (config["ctas"], 3) if "ctas" in config else (None,):
            tried = config if ctas is None else {**config, "ctas": ctas}
            result = verify(op, kernel, tried, problem, DEVICE)
            assert result.ok, f"{tried}: {result.reason}"


@pytest.mark.parametrize("tile", sorted(grouped.MACHINES[0].tiles))
@pytest.mark.parametrize("epilogue", ["none", "bias", "bias+silu_mul", "clamp+silu_mul"])
@pytest.mark.parametrize("gather", [False, True])
def test_tails_and_empty_experts(tile: tuple[int, int], epilogue: str, gather: bool) -> None:
    """Against torch in float32, with rows of no expert, which are zero; twice with the same bits; a graph likewise."""
    bm, bn = tile
    counts, n, k, flags = [3, 0, 70, 1, 183, 128], 208, 200, epilogue.split("+")
    columns = n // 2 if "silu_mul" in flags else n
    generator = torch.Generator(DEVICE).manual_seed(bm + bn)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, generator=generator).bfloat16()

    rows = sum(counts)
    x, w, bias = draw(rows + 9, k), draw(len(counts), n, k) / k**0.5, draw(len(counts), n)
    places = torch.randperm(rows + 9, device=DEVICE, generator=generator).to(torch.int32)
    offsets = torch.tensor([0, *counts], device=DEVICE).cumsum(0).to(torch.int32)
    arguments = {
        "expert_offsets": offsets,
        "permutation": places if gather else None,
        "silu_mul": "silu_mul" in flags,
        "n": n,
        "clamp": "clamp" in flags,
    }
    of_experts = bias if "bias" in flags else None
    expected = OP.reference(x.float(), w.float(), bias=of_experts, **arguments)

    config = {
        **grouped.MACHINES[0].fixed("bf16", TARGET),
        "bm": bm,
        "bn": bn,
        "slots": grouped.MACHINES[0].tiles[tile],
        "epilogue": epilogue,
        "gather": gather,
    }
    buffer = torch.full((rows + 11, columns), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    out = buffer[1:-1]
    call = make_call("grouped_linear", x=x, weight=[w], bias=of_experts, out=out, **arguments)
    grouped.launch(config, call)
    assert bool(buffer[0].isnan().all()) and bool(buffer[-1].isnan().all())
    torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=2e-2)
    first = out.clone()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        grouped.launch(config, call)
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, first)
