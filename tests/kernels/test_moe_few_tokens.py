"""moe_few_tokens_triton in the interpreter: which problems it takes, rows apart, experts of other ranks, NaN, workspaces, planted faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.load import load
from gristmill.kernels.moe.moe import op as moe
from tests.calls import make_call
from tests.conftest import HAS_GPU

pytestmark = pytest.mark.skipif(HAS_GPU, reason="with a GPU here Triton kernels run on it, in the gpu tests")
KERNEL = default_registry().kernel("moe", "moe_few_tokens_triton")


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("m=1,top_k=8,e=8,h=64,i=64", None),
        ("m=4,top_k=8,e=128,h=64,i=64,x=fp16,w=fp16,epilogue=w13_bias+w2_bias+clamp", None),
        ("m=5,top_k=8,e=128,h=64,i=64", "at most 32 entries of 128 experts, got 40"),
        ("m=2,top_k=2,e=8,h=64,i=64", "at most 2 entries of 8 experts, got 4"),
        ("m=1,top_k=2,e=8,h=64,i=64,w=int4_g32", "dense weights"),
        ("m=1,top_k=2,e=8,h=64,i=64,activation=gelu", "activation"),
    ],
)
def test_accepts(problem: str, reason: str | None) -> None:
    refusal = KERNEL.accepts(moe.OP.problem(problem))
    assert refusal is None if reason is None else refusal is not None and reason in refusal


def drawn(m: int, top_k: int, experts: int, hidden: int, inner: int) -> dict[str, Any]:
    """Arguments in float32, on the device of the interpreter."""
    generator = torch.Generator().manual_seed(7)
    return {
        "x": torch.randn(m, hidden, generator=generator),
        "weights": torch.rand(m, top_k, generator=generator),
        "ids": torch.randint(0, experts, (m, top_k), generator=generator).int(),
        "w13": [torch.randn(experts, 2 * inner, hidden, generator=generator) / hidden**0.5],
        "w2": [torch.randn(experts, hidden, inner, generator=generator) / inner**0.5],
        "inter": inner,
    }


def run(arguments: dict[str, Any], workspace: Any = None, config: Any = None) -> torch.Tensor:
    m, hidden = arguments["x"].shape
    text = f"m={m},top_k={arguments['ids'].shape[1]},e={len(arguments['w2'][0])},h={hidden},i={arguments['inter']},x=fp32,w=fp32"
    config = config or KERNEL.config(moe.OP.problem(text), Target.parse("sm_90"))
    out = torch.full((m, hidden), float("nan"))
    load(KERNEL)(config, make_call("moe", **arguments, workspace=workspace, out=out))
    return out


def test_a_token_has_the_same_bits_alone() -> None:
    arguments = drawn(3, 2, 24, 70, 37)
    together = run(arguments)
    for token in range(3):
        one = {name: arguments[name][token : token + 1] for name in ("x", "weights", "ids")}
        assert torch.equal(run(arguments | one)[0], together[token])


def test_entries_of_other_ranks_add_nothing() -> None:
    arguments = drawn(2, 3, 24, 70, 37)
    arguments["ids"][0, 1], arguments["ids"][1] = 24, -1
    for weight in (*arguments["w13"], *arguments["w2"]):  # of experts that no token has: not read
        weight[[e for e in range(24) if e not in arguments["ids"].tolist()[0]]] = float("nan")
    size = KERNEL.workspace(moe.OP.problem("m=2,top_k=3,e=24,h=70,i=37,x=fp32,w=fp32"), {})
    poisoned = torch.full((size.bytes,), 255, dtype=torch.uint8)  # NaN in float32
    out = run(arguments, poisoned)
    with_weights = arguments | {"w13": arguments["w13"][0], "w2": arguments["w2"][0]}
    torch.testing.assert_close(out, moe.reference(**with_weights), rtol=1e-5, atol=1e-5)
    assert not bool(out[1].any())


def test_a_fault_shows() -> None:
    """One weight of one expert, or two weights of a token swapped."""
    arguments = drawn(2, 2, 24, 70, 37)
    out = run(arguments)
    expert = int(arguments["ids"][0, 0])
    for name, at in (("w13", (expert, 36, 69)), ("w13", (expert, 73, 0)), ("w2", (expert, 69, 36))):
        changed = arguments[name][0].clone()
        changed[at] += 1.0
        assert not torch.allclose(run(arguments | {name: [changed]}), out, rtol=1e-5, atol=1e-5)
    swapped = arguments["weights"].flip(1)
    assert not torch.allclose(run(arguments | {"weights": swapped}), out, rtol=1e-5, atol=1e-5)


def test_nan_passes_and_a_small_workspace_is_refused() -> None:
    arguments = drawn(1, 2, 4, 70, 37)
    arguments["x"][0, 3] = float("nan")
    assert bool(run(arguments | {"clamp": True}).isnan().all())
    with pytest.raises(ValueError, match=r"workspace must be 512 contiguous bytes"):
        run(arguments, torch.empty(511, dtype=torch.uint8))


def test_sums_fit_registers() -> None:
    assert KERNEL.space is not None
    for text in ("m=1,top_k=8,e=128,h=2048,i=768", "m=1,top_k=1,e=1,h=1,i=1"):
        for config in KERNEL.space(moe.OP.problem(text), Target.parse("sm_90")):
            for n in (1, 2):
                elements = int(config[f"rows{n}"]) * int(config[f"step{n}"])
                assert elements <= 32 * 32 * int(
                    config[f"warps{n}"]
                )  # of each sum, at most 32 registers per thread


def test_times_are_expected_where_they_were_measured() -> None:
    """A few weights are read in two launches sooner than in five, many are not; where nothing was measured, nothing is expected."""
    dense, hopper = default_registry().kernel("moe", "moe_dense_sm90"), Target.parse("h200")

    def microseconds(text: str) -> list[float]:
        times = [
            kernel.estimate(moe.OP.problem(text), hopper) for kernel in (KERNEL, dense) if kernel.estimate
        ]
        return [us for us in times if us is not None]

    assert microseconds("m=1,top_k=8,e=128,h=2048,i=768") == pytest.approx([28.96, 31.14], rel=0.03)
    # In the tile of two rows, which is 5 to 7 % slower for one token.
    assert microseconds("m=2,top_k=8,e=128,h=2048,i=768")[0] == pytest.approx(48.7, rel=0.08)
    assert microseconds("m=1,top_k=2,e=16,h=4096,i=6400") == pytest.approx([81.4, 85.8], rel=0.03)
    assert microseconds("m=64,top_k=8,e=128,h=2048,i=768")[1] == pytest.approx(282, rel=0.05)
    assert KERNEL.estimate is not None
    for elsewhere in ("a100", "b200", "sm_90", "mi300x"):
        assert (
            KERNEL.estimate(moe.OP.problem("m=1,top_k=8,e=128,h=2048,i=768"), Target.parse(elsewhere)) is None
        )


def test_each_product_has_a_shape_of_its_own() -> None:
    """Down has fewer programs than gate and up, so that small ones suit it: for one token of Mixtral's."""
    assert KERNEL.space is not None
    problem = moe.OP.problem("m=1,top_k=2,e=8,h=4096,i=7168")
    configs = [*KERNEL.space(problem, Target.parse("h200"))]
    assert configs[0] == KERNEL.config(problem, Target.parse("h200"))
    assert len({str(config) for config in configs}) == len(configs)
    assert any(config["rows2"] == 1 and config["rows1"] == 2 for config in configs)
    arguments = drawn(1, 3, 4, 70, 37)
    out = run(arguments)
    for name, value in (("rows1", 1), ("rows2", 8), ("step2", 16)):
        other = {
            **KERNEL.config(moe.OP.problem("m=1,top_k=3,e=4,h=70,i=37,x=fp32,w=fp32"), Target.parse("h200"))
        }
        torch.testing.assert_close(run(arguments, config=other | {name: value}), out, rtol=1e-5, atol=1e-5)
