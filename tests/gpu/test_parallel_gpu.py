"""Models on several GPUs: the logits of one GPU, by decode graphs; a rank that is killed is named and replaced."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gristmill.kernel_registry.policy import Policy
from gristmill.runtime.errors import RankError
from gristmill.runtime.graph_memory import OVER_BOUND
from gristmill.runtime.llm import LLM
from gristmill.runtime.parallel.driver import ParallelRunner
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.tools.evaluate import window_logits
from tests.gpu import scarce_rank
from tests.runtime import oracle
from tests.runtime.oracle import DEEPSEEK, LLAMA, MODELS

pytestmark = pytest.mark.gpu
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
PROMPTS = 4


@pytest.fixture(params=[LLAMA, DEEPSEEK])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LLM]]:
    """Returns a model on one GPU and on two, in bfloat16."""
    policy = Policy(cache=str(tmp_path_factory.mktemp("gristmill")))
    models = [
        LLM(
            MODELS / request.param,
            device="cuda",
            dtype="bf16",
            policy=policy,
            num_blocks=256,
            warm="off",
            tensor_parallel=world,
            enable_prefix_cache=False,  # a prompt that is partly cached runs in other shapes, with other rounding
        )
        for world in (1, 2)
    ]
    yield models
    models[1].close()


@needs_two
def test_two_gpus_compute_the_logits_of_one(pair: list[LLM]) -> None:
    """Partial sums are rounded to bfloat16 on each rank: logits agree to its precision, and two runs have the same bits.

    Where the scores of two experts are that close, a token gets another expert: in a model with experts, at few positions.
    """
    ids = oracle.window(0)[:129]
    one, two = (window_logits(llm.engine, ids).float().cpu() for llm in pair)
    far = (one - two).abs().amax(-1) / one.abs().max() > 0.05
    experts = pair[0].engine.runner.model.config.moe is not None
    assert int(far.sum()) <= (len(ids) // 10 if experts else 0), far.nonzero().flatten().tolist()
    chosen = {row["op"]: row["kernel"] for row in pair[1].explain()}
    assert chosen["all_reduce_add_rms_norm"] == "all_reduce_add_rms_norm_sm90", chosen
    params = SamplingParams(max_tokens=48)
    prompts = oracle.prompts()[:PROMPTS]
    first, second = ([r.token_ids for r in pair[1].generate(prompts, params)] for _ in range(2))
    assert first == second
    assert any(row["captured"] and row["steps"] for row in pair[1].explain_graphs()), (
        "collectives are captured"
    )


@needs_two
@pytest.mark.parametrize("name", [LLAMA, DEEPSEEK])
def test_contexts_spread_over_two_gpus(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """As above, with half of each context on each GPU; decode steps are captured."""
    policy = Policy(cache=str(tmp_path_factory.mktemp("gristmill")))
    options: dict[str, Any] = {
        "device": "cuda",
        "dtype": "bf16",
        "policy": policy,
        "num_blocks": 128,
        "warm": "off",
    }
    one = LLM(MODELS / name, **options)
    options |= {"enable_prefix_cache": False, "max_batch_tokens": 512}
    two = LLM(MODELS / name, tensor_parallel=2, context_parallel=True, **options)
    try:
        ids = oracle.window(0)[:129]
        logits, spread = (window_logits(llm.engine, ids).float().cpu() for llm in (one, two))
        far = (spread - logits).abs().amax(-1) / logits.abs().max() > 0.05
        experts = one.engine.runner.model.config.moe is not None
        assert int(far.sum()) <= (len(ids) // 10 if experts else 0), far.nonzero().flatten().tolist()
        params = SamplingParams(max_tokens=48)
        prompts = oracle.prompts()[:PROMPTS]
        first, second = ([r.token_ids for r in two.generate(prompts, params)] for _ in range(2))
        assert first == second
        rows = two.explain_graphs()
        assert any(row["captured"] and row["steps"] for row in rows if row["seqs"]), rows
        assert {"all_gather", "all_to_all"} <= {row["op"] for row in two.explain()}

        # Chunks after the first one get the contexts before them from both GPUs.
        long, wish = oracle.window(1, 1000), SamplingParams(max_tokens=1, prompt_logprobs=0)
        whole, chunks = (llm.generate([long], wish)[0].prompt_logprobs for llm in (one, two))
        gaps = [abs(a.logprob - b.logprob) for a, b in zip(whole[1:], chunks[1:], strict=True)]
        assert sum(gaps) / len(gaps) < 0.1, gaps
    finally:
        two.close()


@needs_two
def test_a_rank_without_room_for_graphs(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Both ranks run every step kernel by kernel then, and neither waits for the other: with prompts and without, in the warm-up and after it."""
    policy = Policy(cache=str(tmp_path_factory.mktemp("gristmill")))
    options: dict[str, Any] = {"device": "cuda", "dtype": "bf16", "policy": policy, "num_blocks": 256}
    prompts, params = oracle.prompts()[:PROMPTS], SamplingParams(max_tokens=24)
    monkeypatch.setattr(ParallelRunner, "module", scarce_rank.MODULE)
    llm = LLM(MODELS / LLAMA, tensor_parallel=2, rank_timeout=30, **options)
    try:
        completions = llm.generate(prompts, params)
        rows = llm.explain_graphs()
    finally:
        llm.close()
    assert all(len(one.token_ids) for one in completions)
    assert not any(row["captured"] for row in rows) and OVER_BOUND in {row["reason"] for row in rows}


@needs_two
def test_a_killed_rank_is_named_and_replaced(pair: list[LLM]) -> None:
    llm = pair[1]
    runner = llm.engine.runner
    assert isinstance(runner, ParallelRunner)
    prompt, params = oracle.prompts()[5], SamplingParams(max_tokens=16)
    expected = llm.generate([prompt], params)[0].token_ids
    stream = llm.stream([prompt], SamplingParams(max_tokens=64))
    next(stream)
    os.kill(runner._processes[1].process.pid, signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1 died"):
        list(stream)
    assert llm.generate([prompt], params)[0].token_ids == expected
