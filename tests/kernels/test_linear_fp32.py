"""linear_fp32 in the interpreter: programs that share K, counters, rows apart, what is exact, planted faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.linear_fp32 import op as linear_fp32
from gristmill.kernels.linear.linear_fp32 import triton as in_triton
from gristmill.kernels.load import load
from tests.calls import make_call
from tests.conftest import HAS_GPU

OP = linear_fp32.OP
KERNEL, INVARIANT = (
    default_registry().kernel("linear_fp32", f"linear_fp32_{name}") for name in ("triton", "invariant_triton")
)
HOPPER = Target.parse("h200")
in_the_interpreter = pytest.mark.skipif(
    HAS_GPU, reason="with a GPU here Triton kernels run on it, in the gpu tests"
)
SHARED = {"bm": 16, "bn": 16, "bk": 32, "parts": 3, "warps": 4, "stages": 3}


def drawn(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    return {
        "x": torch.randn(m, k, generator=generator).to(dtype),
        "weight": (torch.randn(n, k, generator=generator) / k**0.5).to(dtype),
        "bias": torch.randn(n, generator=generator),
    }


def run(config: Any, arguments: dict[str, Any], workspace: Any = None, kernel: Any = KERNEL) -> torch.Tensor:
    out = torch.full((arguments["x"].shape[0], arguments["weight"].shape[0]), float("nan"))
    load(kernel)(config, make_call("linear_fp32", **arguments, workspace=workspace, out=out))
    return out


@in_the_interpreter
def test_counters_are_zero_for_the_next_call_of_any_size() -> None:
    """One workspace for calls of 40, 3 and 40 rows, whose sums lie in other places."""
    size = KERNEL.workspace(OP.problem("m=40,n=33,k=200,bias=true"), SHARED)
    assert size.zeroed
    workspace = torch.zeros(size.bytes, dtype=torch.uint8)
    many, few = drawn(40, 33, 200), drawn(3, 33, 200)
    first = run(SHARED, many, workspace)
    for arguments in (few, many):
        out = run(SHARED, arguments, workspace)
        torch.testing.assert_close(out, linear_fp32.reference(**arguments), rtol=1e-5, atol=1e-5)
        assert not workspace[: in_triton.COUNTER_BYTES].any()
    assert torch.equal(run(SHARED, many, workspace), first)


@in_the_interpreter
@pytest.mark.parametrize("parts", [1, 2, 5, 7])
def test_parts_of_k_add_up(parts: int) -> None:
    """Also parts without a step: K has 7, and 5 parts have two each."""
    arguments = drawn(5, 20, 210)
    out = run({**SHARED, "parts": parts}, arguments)
    torch.testing.assert_close(out, linear_fp32.reference(**arguments), rtol=1e-5, atol=1e-5)


@in_the_interpreter
def test_a_weight_in_float32_is_not_rounded() -> None:
    arguments = drawn(4, 8, 96)
    arguments["weight"] = torch.randn(8, 96, generator=torch.Generator().manual_seed(1)) / 10
    out, exact = run(SHARED, arguments), linear_fp32.reference(**arguments)
    rounded = linear_fp32.reference(**{**arguments, "weight": arguments["weight"].bfloat16()})
    assert float((out - exact).abs().max()) < 1e-5 < float((rounded - exact).abs().max())


@in_the_interpreter
def test_logits_are_not_rounded_to_16_bits() -> None:
    arguments = drawn(4, 8, 512)
    out, exact = run(SHARED, arguments), linear_fp32.reference(**arguments)
    assert float((out - exact).abs().max()) < 1e-5 < float((exact.bfloat16().float() - exact).abs().max())


@in_the_interpreter
def test_rows_have_the_same_bits_alone() -> None:
    arguments = drawn(37, 24, 160)
    config = INVARIANT.config(OP.problem("m=37,n=24,k=160,bias=true"), HOPPER)
    together = run(config, arguments, kernel=INVARIANT)
    for row in (0, 15, 16, 36):
        alone = run(config, {**arguments, "x": arguments["x"][row : row + 1]}, kernel=INVARIANT)
        assert torch.equal(alone[0], together[row])


@in_the_interpreter
def test_a_fault_shows() -> None:
    """One weight, and one number of x, in the last step of K."""
    arguments = drawn(3, 20, 200)
    out = run(SHARED, arguments)
    for name, at in (("weight", (19, 199)), ("x", (2, 199)), ("bias", (19,))):
        changed = arguments[name].clone()
        changed[at] += 0.5
        assert not torch.allclose(run(SHARED, {**arguments, name: changed}), out, rtol=1e-5, atol=1e-5)


def test_configurations() -> None:
    """Few tokens fill the device; every part of K has a step; the invariant one has the same tile and parts for any number of rows."""
    for text in ("m=1,n=256,k=7168", "m=16,n=128,k=2048", "m=1,n=1,k=2048", "m=4096,n=256,k=7168,w=fp32"):
        assert KERNEL.space is not None
        problem = OP.problem(text)
        configs = [*KERNEL.space(problem, HOPPER)]
        assert (
            configs[0] == KERNEL.config(problem, HOPPER)
            and len({str(c) for c in configs}) == len(configs) > 3
        )
        for config in configs:
            steps = -(-problem.integer("k") // int(config["bk"]))
            assert KERNEL.misfit(problem, config) is None
            assert int(config["parts"]) == -(-steps // -(-steps // int(config["parts"])))
    few = KERNEL.config(OP.problem("m=16,n=256,k=7168"), HOPPER)
    assert 100 <= int(few["parts"]) * 256 // int(few["bn"]) <= 132
    assert KERNEL.config(OP.problem("m=4096,n=256,k=7168"), HOPPER)["parts"] == 1
    of_rows = [INVARIANT.config(OP.problem(f"m={m},n=256,k=7168"), HOPPER) for m in (1, 64, 4096)]
    assert of_rows[0] == of_rows[1] == of_rows[2]


def test_a_configuration_serves_as_many_tiles_as_there_are_counters() -> None:
    tiles = in_triton.TILES
    assert KERNEL.misfit(OP.problem(f"m={16 * tiles},n=16,k=64"), SHARED) is None
    assert "not of 1025" in str(KERNEL.misfit(OP.problem(f"m={16 * tiles + 1},n=16,k=64"), SHARED))
