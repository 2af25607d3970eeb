"""Whole models on the GPU: greedy ids of the CPU oracle, and the loss with quantized weights, also under
strict policies."""

from __future__ import annotations

import pytest

from gristmill.kernel_registry.policy import Policy
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.tools.evaluate import evaluate
from tests.runtime import oracle
from tests.runtime.oracle import ARCHITECTURES, MODELS, NAMES, Comparison, answer
from tests.runtime.proofs import proves

pytestmark = pytest.mark.gpu
TRITON = Policy(pins={"*": ("*_triton", "*_triton_split", "moe_chain*")}, strict=True, origin="strict Triton")


@proves("logits and ids", "a GPU", ARCHITECTURES, record="bench/results/h200/pytest_gpu.json")
@pytest.mark.parametrize("policy", [None, TRITON], ids=["default", "strict Triton"])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_ids(name: str, policy: Policy | None) -> None:
    llm = LLM(MODELS / name, warm="off", dtype="fp32", device="cuda", policy=policy, num_blocks=512)
    prompts = oracle.prompts()[2:18:3]
    actual = Comparison(f"{name} on the GPU")
    for prompt, result in zip(prompts, llm.generate(prompts, SamplingParams(max_tokens=64)), strict=True):
        actual.add(result.token_ids, answer(name, tuple(prompt), result.token_ids))
    actual.finish()


@pytest.mark.parametrize("scheme", ["int4_g128", "fp8_block", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("name", NAMES)
def test_quantized_loss_is_the_same_as_on_the_cpu(name: str, scheme: str) -> None:
    ids = oracle.eval_tokens()[:4096]
    losses = [
        evaluate(
            LLM(MODELS / name, warm="off", dtype="bf16", quant=scheme, device=device, num_blocks=256).engine,
            ids,
            1024,
            4,
        ).loss
        for device in ("cpu", "cuda")
    ]
    assert abs(losses[0] - losses[1]) < 0.003, losses
