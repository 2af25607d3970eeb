"""A layout whose only kernel fails for some size is not packed; what cannot be served is said when a model is loaded."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill import nn
from gristmill.kernel_registry.plan import bucket_sizes
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.select import NoKernelError
from gristmill.quant import quantize
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from tests.runtime.planted import EXPERTS, LAYOUT, LINEAR, REASON, planted
from tests.runtime.random_checkpoint import MIXTRAL, Random

pytestmark = pytest.mark.filterwarnings("ignore:.*is quarantined")
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
PROMPTS = [[3, 1, 4], [1, 5], [9, 2, 6, 5], [3], [5, 8]]


def load(policy: Policy) -> LLM:
    limits: dict[str, Any] = {
        "num_blocks": 32,
        "max_seqs": 8,
        "max_batch_tokens": 64,
        "max_model_len": 64,
        "warm": "off",
    }
    return LLM(Random("cpu", MIXTRAL, **SIZES), quant="int4_g128", device="cpu", policy=policy, **limits)


def serve(llm: LLM) -> None:
    for count in (1, 2, 5):
        results = llm.generate(PROMPTS[:count], SamplingParams(max_tokens=3, ignore_eos=True))
        assert [len(result.token_ids) for result in results] == [3] * count


def expert_plan(llm: LLM) -> Any:
    (plan,) = (plan for plan in llm.engine.runner.model.plans.bound.values() if plan.op.name == "moe")
    return plan


def fails_at_two(problem: Problem) -> bool:
    return problem["m"] == 2


@pytest.fixture
def own(tmp_path: Path) -> Policy:
    return Policy(cache=str(tmp_path))


def test_experts_are_packed_for_a_kernel_that_serves_every_size(own: Policy) -> None:
    with planted(EXPERTS) as judge, warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(not packed|quarantined)")
        llm = load(own)
        assert expert_plan(llm).layouts == {LAYOUT}
        problems = judge.of_planted
        assert len(problems) == len(set(problems)) > 5, "each once, for both layers"
        serve(llm)
        assert judge.of_planted == problems, "nothing is left to verify"
        assert {entry.kernel for entry in expert_plan(llm).entries if entry is not None} == {EXPERTS.name}


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_experts_whose_kernel_fails_for_one_size_are_packed_otherwise(own: Policy, warm: bool) -> None:
    with planted(EXPERTS, fails=fails_at_two):
        with pytest.warns(RuntimeWarning) as caught:
            llm = load(own)
        (text,) = (str(w.message) for w in caught if "not packed" in str(w.message))
        for part in (
            "layers.0.experts: ",
            "moe top_k=2,e=8,h=128,i=256,w=int4_g128",
            LAYOUT,
            "m=2,",
            EXPERTS.name,
        ):
            assert part in text
        assert "quarantined" in text and REASON in text
        assert LAYOUT not in expert_plan(llm).layouts
        if warm:
            llm.engine.warm_up()
        serve(llm)


def test_a_second_load_knows_it_from_the_store(own: Policy) -> None:
    with planted(EXPERTS, fails=fails_at_two), pytest.warns(RuntimeWarning, match="not packed"):
        load(own)
    with planted(EXPERTS, fails=fails_at_two) as judge, pytest.warns(RuntimeWarning, match="not packed"):
        llm = load(own)
        assert judge.of_planted == [] and LAYOUT not in expert_plan(llm).layouts


def test_a_model_that_no_kernel_serves_is_refused_when_it_is_loaded(own: Policy) -> None:
    strict = Policy(cache=own.cache, pins={"moe": (EXPERTS.name,)}, strict=True, origin="the test")
    with planted(EXPERTS, fails=fails_at_two), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(NoKernelError) as refused:
            load(strict)
    text = str(refused.value)
    assert re.search(r"layers\.0\.experts: no kernel for moe m=16,top_k=2,e=8", text)
    assert f"layout {LAYOUT}: m=2,top_k=2,e=8" in text and f"{EXPERTS.name} is quarantined: {REASON}" in text


def test_linear_is_packed_for_kernels_that_serve_every_size(own: Policy) -> None:
    weight, x = quantize(torch.randn(64, 256), "int4_g128"), torch.randn(2, 256, dtype=torch.bfloat16)
    with planted(LINEAR) as judge:
        layer = nn.Linear(weight, policy=own)
        assert set(layer._packed) == {LAYOUT}
        assert {size for size in bucket_sizes() if size <= 257} <= {
            int(re.match(r"m=(\d+)", problem)[1]) for problem in judge.of_planted
        }
        expected = layer(x)
    with planted(LINEAR, fails=lambda problem: problem["m"] == 4):
        with pytest.warns(RuntimeWarning, match=f"not packed as {LAYOUT}.* m=4,n=64"):
            layer = nn.Linear(weight, policy=Policy(cache=own.cache + "/other"))
        assert LAYOUT not in layer._packed
        torch.testing.assert_close(layer(x), expected, rtol=2e-2, atol=2e-2)


def test_nothing_more_is_verified_where_another_kernel_reads_the_layout(own: Policy) -> None:
    with planted() as judge:
        load(own)
    quantized = [problem for _, problem in judge.asked if "w=int4_g128" in problem]
    assert quantized and {int(re.match(r"m=(\d+)", problem)[1]) for problem in quantized} <= {1, 16, 256}
