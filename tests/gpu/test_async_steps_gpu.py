"""Asynchronous steps on a GPU: same ids as synchronous ones, and the host does not wait for a step before it launches the next."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from gristmill.kernel_registry.policy import Policy
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from tests.runtime import oracle
from tests.runtime.oracle import DEEPSEEK, LLAMA, MODELS

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
