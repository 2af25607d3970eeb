"""Two ranks of the worker in processes that vLLM starts, and steps ahead of their results: the ids of the runtime."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams

from tests.integrations.vllm.conftest import MODELS
from tests.integrations.vllm.test_steps import structured
from tests.integrations.vllm.test_worker import GREEDY, Host, generated, own, prompts, texts


def test_two_ranks(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def checked(cls: Any, config: Any) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = True  # a thread of each process takes the results

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(checked))
    llm, ids = host("docs-llama", tensor_parallel_size=2), texts(5)
    expected = own("docs-llama", ids)
    # Sums over ranks have another order: a near tie may go the other way.
    got = generated(llm.generate(prompts(ids), GREEDY))
    assert sum(a == b for a, b in zip(got, expected, strict=True)) >= 4
    edited = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, repetition_penalty=1.2, logprobs=1)
    outputs = llm.generate(prompts(ids[:2]), [edited, structured(regex="(ab ){3}c")])
    assert generated(outputs)[0] == own("docs-llama", ids[:1], repetition_penalty=1.2)[0]
    assert outputs[1].outputs[0].text == "ab ab ab c"
    first, second = llm.collective_rpc("explain")
    assert first == second and any(row["op"].startswith("all_reduce") for row in first)
    with pytest.raises(Exception, match="does not reach the ranks"):
        llm.collective_rpc("gristmill_update_weights", args=(str(MODELS / "docs-llama"),))
    llm.llm_engine.engine_core.shutdown()
