"""Asynchronous steps on a GPU: same ids as synchronous ones, and the host does not wait for a step before it launches the next."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gristmill.kernel_registry.policy import Policy
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from tests.runtime import oracle
from tests.runtime.oracle import DEEPSEEK, LLAMA, MODELS
from tests.runtime.test_async_steps import DETAILED, WITH_GRAMMARS

pytestmark = pytest.mark.gpu
# The rows of these kernels do not depend on the batch, which differs where an end token is seen one step late.
TRITON = Policy(pins={"*": ("*_triton",)}, strict=True, origin="strict Triton")
PARAMS = [
    SamplingParams(max_tokens=60),
    SamplingParams(max_tokens=33, temperature=0.8, seed=3),
    SamplingParams(max_tokens=47, temperature=1.2, top_k=20, top_p=0.9, seed=5),
    SamplingParams(max_tokens=12, temperature=1.0, seed=7, repetition_penalty=1.2),
    SamplingParams(max_tokens=1),
]


def load(name: str, async_steps: bool, **options: Any) -> LLM:
    options = {"num_blocks": 512, **options}
    return LLM(
        MODELS / name,
        warm="off",
        dtype="fp32",
        device="cuda",
        policy=TRITON,
        async_steps=async_steps,
        **options,
    )


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", [LLAMA, DEEPSEEK])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_blocks": 16, "max_seqs": 4}, {"max_chunk": 8, "max_seqs": 5}],
    ids=["plain", "preemption", "chunks"],
)
def test_same_ids(name: str, options: dict[str, int], graphs: bool) -> None:
    tokens = oracle.eval_tokens()
    prompts = [tokens[40 * n : 40 * n + 1 + 5 * (n % 9)] for n in range(40)]
    params = [PARAMS[n % 5] for n in range(40)]
    expected = load(name, False, decode_graphs=graphs, **options).generate(prompts, params)
    through = load(name, True, decode_graphs=graphs, **options)
    for _ in range(3):
        assert through.generate(prompts, params) == expected
    through.engine.scheduler.check()


@pytest.mark.parametrize("graphs", [True, False])
def test_nothing_waits_for_penalties_logprobs_and_grammars(graphs: bool) -> None:
    """The results of synchronous steps, by launches that do not synchronize: torch would raise."""
    pytest.importorskip("llguidance")
    tokens = oracle.eval_tokens()
    params = [(*DETAILED, *WITH_GRAMMARS)[n % 14] for n in range(28)]
    prompts = [tokens[40 * n : 40 * n + 1 + 5 * (n % 9)] for n in range(28)]
    expected = load(LLAMA, False, decode_graphs=graphs).generate(prompts, params)
    through = load(LLAMA, True, decode_graphs=graphs)
    assert len(through.generate(prompts, params)) == len(
        expected
    )  # kernels are compiled, graphs captured, and memory is pinned
    runner, ahead = through.engine.runner, 0
    launch, complete = runner.launch, runner.complete

    def guarded(call: Callable[..., Any], *arguments: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return call(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def launched(entries: Any, *others: Any) -> Any:
        nonlocal ahead
        ahead += sum(entry.tokens is None for entry in entries)
        return guarded(launch, entries, *others)

    runner.launch = launched  # type: ignore[method-assign]
    runner.complete = lambda step: guarded(complete, step)  # type: ignore[method-assign]
    actual = through.generate(prompts, params)
    assert [one.token_ids for one in actual] == [one.token_ids for one in expected]
    for one, other in zip(actual, expected, strict=True):
        for ours, theirs in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert ours.token_id == theirs.token_id and abs(ours.logprob - theirs.logprob) < 1e-4
    assert ahead > 0.8 * sum(len(one.token_ids) - 1 for one in expected)


def test_the_second_step_is_launched_while_the_first_runs() -> None:
    """The device is kept busy for 0.3 s: synchronous steps would wait for it between two launches."""
    llm = load(LLAMA, True)
    runner, params = llm.engine.runner, SamplingParams(max_tokens=40, ignore_eos=True)
    llm.generate([[1, 2, 3]], params)  # captures the graphs
    launched: list[float] = []
    launch = runner.launch
    runner.launch = lambda *step: (launched.append(time.perf_counter()), launch(*step))[1]  # type: ignore[method-assign, func-returns-value]
    llm.engine.add_request("a", [4, 5, 6], params)
    begin = time.perf_counter()
    torch.cuda._sleep(600_000_000)  # cycles, of a clock of at most 2 GHz
    outputs = llm.engine.step()
    assert len(outputs) == 1 and len(launched) == 2
    assert launched[1] - begin < 0.1 < time.perf_counter() - begin
    llm.engine.abort()
    assert not llm.engine.has_unfinished() and llm.generate([[1, 2, 3]], params)[0].finish_reason == "length"


def test_they_are_the_default_on_a_gpu() -> None:
    depths = [
        LLM(
            MODELS / LLAMA, warm="off", device="cuda", num_blocks=64, async_steps=asked
        ).engine._pipeline.depth
        for asked in (None, True, False)
    ]
    assert depths == [2, 2, 1]
