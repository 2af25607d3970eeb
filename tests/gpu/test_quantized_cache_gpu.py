"""KV caches of e4m3 codes on the GPU: the hardware's conversion against integer arithmetic, decode graphs,
losses as on the CPU."""

from __future__ import annotations

import pytest
import torch

from gristmill.autotune.device import device_target
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.load import load
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.tools.evaluate import evaluate
from tests.calls import make_call
from tests.runtime import oracle
from tests.runtime.oracle import LLAMA, MODELS

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*no scales of the KV cache")]
DEVICE = "cuda:0"
TRITON = Policy(pins={"*": ("*_triton",)}, strict=True, origin="strict Triton")


@pytest.mark.parametrize("name", ["paged_attention_triton", "paged_attention_triton_split"])
@pytest.mark.parametrize("kv_scale", ["head", "token"])
@pytest.mark.parametrize("x", ["bf16", "fp16", "fp32"])
def test_both_ways_of_decoding_give_the_same_bits(name: str, kv_scale: str, x: str) -> None:
    kernel = default_registry().kernel("paged_attention", name)
    text = "q_tokens=9,seqs=5,max_q=3,max_ctx=700,total_ctx=2000,heads=8,kv_heads=2,head_dim=128,lse=true"
    problem = default_registry().op("paged_attention").problem(f"{text},x={x},kv=fp8,kv_scale={kv_scale}")
    arguments = default_registry().op("paged_attention").inputs(problem, 1, DEVICE)
    config = kernel.config(problem, device_target(DEVICE, Policy()))
    results = []
    for native in (True, False):
        out = torch.full_like(arguments[0].contiguous(), float("nan"))
        load(kernel)({**config, "native": native}, make_call(kernel.op, *arguments, out))
        results.append((out, arguments[11].clone()))
    assert config["native"] and results[0][0].isfinite().all()
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_token_head"])
def test_decode_graphs_give_the_same_ids(kv_dtype: str) -> None:
    start = oracle.eval_tokens()[:40]
    prompts = [start + oracle.eval_tokens()[n : n + 7] for n in (100, 200, 300)] + [start] * 2
    eager, graphs = (
        LLM(
            MODELS / LLAMA,
            warm="off",
            dtype="bf16",
            kv_dtype=kv_dtype,
            device="cuda",
            policy=TRITON,
            num_blocks=20,
            decode_graphs=on,
        )
        for on in (False, True)
    )
    params = SamplingParams(max_tokens=24)
    expected = eager.generate(prompts, params)
    assert graphs.generate(prompts, params) == expected
    assert graphs.generate(prompts, params) == expected  # replays only
    assert {row["captured"] for row in graphs.explain_graphs() if row["seqs"]} == {True}


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "fp8_token_head"])
def test_the_loss_is_the_same_as_on_the_cpu(kv_dtype: str) -> None:
    ids = oracle.eval_tokens()[:4096]
    losses = [
        evaluate(
            LLM(
                MODELS / LLAMA, warm="off", dtype="bf16", kv_dtype=kv_dtype, device=device, num_blocks=256
            ).engine,
            ids,
            1024,
            4,
        ).loss
        for device in ("cpu", "cuda")
    ]
    assert abs(losses[0] - losses[1]) < 0.003, losses
