"""Layers of Mixtral's size in four bits answer one request and several, with and without a warm-up."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from gristmill.kernel_registry.policy import Policy
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from tests.runtime.random_checkpoint import MIXTRAL, Random

pytestmark = pytest.mark.gpu
PROMPTS = [[(31 * request + 7 * i) % 1024 for i in range(3 + 5 * request)] for request in range(16)]
TOKENS = 6


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """One empty store for all tests of this module: what the first ones verify, the others do not verify again."""
    return Policy(cache=str(tmp_path_factory.mktemp("cache")), origin="the test")


def answers(llm: LLM, count: int) -> list[list[int]]:
    results = llm.generate(PROMPTS[:count], SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    assert [len(result.token_ids) for result in results] == [TOKENS] * count
    assert all(result.finish_reason == "length" for result in results)
    return [list(result.token_ids) for result in results]


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("scheme", ["int4_g128", "mxfp4"])
def test_any_number_of_requests_is_answered(scheme: str, warm: bool, policy: Policy) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*quarantined.*")
        limits: dict[str, Any] = {
            "num_blocks": 256,
            "max_seqs": 16,
            "max_batch_tokens": 1024,
            "max_model_len": 256,
        }
        llm = LLM(Random("cuda", MIXTRAL), warm="off", quant=scheme, device="cuda", policy=policy, **limits)
        if warm:
            llm.engine.warm_up()
        alone = answers(llm, 1)
        for count in (2, 5, 16):
            assert len(answers(llm, count)) == count
        assert answers(llm, 1) == alone
    plans = [plan for plan in llm.engine.runner.model.plans.bound.values() if plan.op.name == "moe"]
    entries = [entry for plan in plans for entry in plan.entries if entry is not None]
    assert len(plans) == 1 and len(entries) >= 4
    if torch.cuda.get_device_capability() == (9, 0):
        assert {entry.kernel for entry in entries} == {"moe_sm90"}
