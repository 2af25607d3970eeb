"""moe_chain_triton in the interpreter: tiles of each product, the bound of experts, the space."""

from __future__ import annotations

import pytest
import torch

from gristmill.autotune.verify import verify
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.moe.moe import chain
from gristmill.kernels.moe.moe import op as moe
from gristmill.kernels.random_inputs import Draw
from tests.conftest import HAS_GPU

OP = default_registry().op("moe")
KERNEL = default_registry().kernel("moe", "moe_chain_triton")
HOPPER = Target.parse("h200")
MIXTRAL = "m={m},top_k=2,e=8,h=4096,i=7168"
in_the_interpreter = pytest.mark.skipif(
    HAS_GPU, reason="with a GPU here Triton kernels run on it, in the gpu tests"
)


@in_the_interpreter
@pytest.mark.parametrize(
    "other",
    [{"be": 32}, {"bm2": 32, "bn2": 128, "bk2": 32}, {"bn1": 32, "bk1": 128}, {"bm1": 64, "bm2": 16}],
    ids=lambda other: ",".join(other),
)
def test_tiles_of_one_product_and_more_experts_than_there_are(other: dict[str, int]) -> None:
    problem = OP.problem("m=11,top_k=3,e=6,h=72,i=40")
    result = verify(OP, KERNEL, {**KERNEL.config(problem, HOPPER), **other}, problem, "cpu")
    assert result.ok, result.reason


def test_a_product_has_its_own_tile() -> None:
    config = {"scheme": "bf16", "be": 8, "bm": 16, "bn": 64, "bk": 64, "warps": 4, "stages": 3}
    first, second = (chain.config_of({**config, "bn2": 128, "stages1": 5}, product) for product in (1, 2))
    assert first == {**config, "stages": 5} and second == {**config, "bn": 128}


def test_experts_past_the_bound_are_refused() -> None:
    config = KERNEL.config(OP.problem("m=4,top_k=8,e=33,h=64,i=64"), HOPPER)
    assert config["be"] == 64 and KERNEL.takes(OP.problem("m=4,top_k=8,e=64,h=64,i=64"), config)
    assert "among up to 64, not 65" in str(KERNEL.misfit(OP.problem("m=4,top_k=8,e=65,h=64,i=64"), config))


@pytest.mark.parametrize("m", [1, 16, 64, 256, 4096])
@pytest.mark.parametrize("target", ["h200", "sm_80", "sm_86", "gfx942"])
def test_configurations_fit_and_differ(m: int, target: str) -> None:
    assert KERNEL.space is not None
    problem, device = OP.problem(MIXTRAL.format(m=m)), Target.parse(target)
    configs = [*KERNEL.space(problem, device)]
    assert configs[0] == KERNEL.config(problem, device)
    tiles = [
        tuple(chain.config_of(config, n)[name] for n in (1, 2) for name in chain.TILE) for config in configs
    ]
    assert len(set(tiles)) == len(tiles) <= 49
    for config in configs[1:]:
        for product in (1, 2):
            own = chain.config_of(config, product)
            ring = int(own["stages"]) * (int(own["bm"]) + int(own["bn"])) * int(own["bk"]) * 2
            assert ring <= (device.smem_bytes or chain.SMALLEST_SHARED), config


def test_few_rows_have_narrow_tiles_and_deep_pipelines_to_choose_from() -> None:
    assert KERNEL.space is not None
    configs = [*KERNEL.space(OP.problem(MIXTRAL.format(m=16)), HOPPER)]
    assert {config["bm"] for config in configs} == {16, 32, 64}
    assert any(config["bm"] == 16 and config["stages"] >= 4 and config["bk"] >= 128 for config in configs)
    assert any("bn2" in config and "bn1" not in config for config in configs)


def test_what_is_verified_on_fewer_experts_is_the_program_that_runs() -> None:
    """The bound of experts, which is compiled in, is that of the problem."""
    problem = OP.problem("m=64,top_k=8,e=128,h=2048,i=768")
    config = KERNEL.config(problem, HOPPER)
    small = OP.verification(problem, KERNEL, config)
    assert small.integer("e") == 16 and config["be"] == 128


@pytest.mark.parametrize(
    ("problem", "source"),
    [
        ("m=1,top_k=2,e=8,h=4096,i=7168", "cpu:0"),
        ("m=65,top_k=8,e=16,h=512,i=256", "cpu"),
        ("m=16,top_k=2,e=8,h=4096,i=7168,w=int4_g128,act_order=true", "cpu"),
    ],
)
def test_a_device_draws_large_experts_and_no_routing(
    problem: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cpu:0 stands for a device, whose generator draws other numbers. One token of eight experts has two of them, whatever draws the weights."""

    class OnDevice(Draw):
        def __init__(self, problem: Problem, seed: int, device: str, source: str = "cpu") -> None:
            super().__init__(problem, seed + (source != "cpu"), device)
            self.source = source

    sources: list[str] = []
    monkeypatch.setattr(moe, "Draw", OnDevice)
    monkeypatch.setattr(moe, "random_weight", lambda draw, *shape: sources.append(draw.source))
    parsed = OP.problem(problem)
    x, weights, ids, *_ = OP.inputs(parsed, 0, "cpu:0")
    assert sources == [source, source]
    drawn = Draw(parsed, 0, "cpu")
    m, top_k = parsed.integers("m", "top_k")
    assert torch.equal(ids, drawn.experts(m, top_k, power=1.5, foreign=0.03))
    assert len(ids[0].unique()) == 2 or m > 1
