"""Decode steps over buffers that never move give the same ids as without, whatever the batch does. Capture
itself: tests/gpu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gristmill.kernel_registry.kernel import Workspace
from gristmill.runtime.decode_graphs import DecodeGraphs
from gristmill.runtime.decode_inputs import Buffers
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.workspace import Arenas
from tests.runtime import oracle
from tests.runtime.oracle import DEEPSEEK, LLAMA

PARAMS = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=9, temperature=0.8, seed=3),
    SamplingParams(max_tokens=17, temperature=1.2, top_k=20, top_p=0.9, seed=5),
    SamplingParams(max_tokens=30),
]


def both(make: Callable[..., LLM], name: str, **options: Any) -> list[LLM]:
    return [make(name, decode_graphs=on, **options) for on in (False, True)]


def wide(options: dict[str, Any]) -> dict[str, Any]:
    """Prompts with a common prefix, so that the prefix cache serves some of them."""
    start = oracle.eval_tokens()[:40]
    return {
        "prompts": [start + oracle.eval_tokens()[n : n + 7] for n in (100, 200, 300, 400)] + [start] * 3,
        **options,
    }


@pytest.mark.parametrize("name", [LLAMA, DEEPSEEK])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_blocks": 14, "max_seqs": 4},
        {"max_chunk": 8, "max_seqs": 3},
        {"enable_prefix_cache": False, "block_size": 5},
    ],
    ids=["plain", "preemption", "chunks", "odd blocks"],
)
def test_same_ids(make: Callable[..., LLM], name: str, options: dict[str, Any]) -> None:
    """Preemption, the prefix cache, and requests that come and go do not change the ids."""
    without, through = both(make, name, **options)
    prompts = wide({})["prompts"]
    params = [PARAMS[i % 4] for i in range(len(prompts))]
    scheduler, preempted = through.engine.scheduler, []
    commit = scheduler.commit
    scheduler.commit = lambda plan: (preempted.extend(plan.preempted), commit(plan))  # type: ignore[method-assign]
    assert through.generate(prompts, params) == without.generate(prompts, params)
    decode = through.engine.runner.decode
    assert decode is not None and sum(g.steps for g in decode.graphs.values()) > 20
    assert not without.explain_graphs()
    if options.get("num_blocks") == 14:
        assert preempted


def test_least_graph_that_holds_the_step(make: Callable[..., LLM]) -> None:
    llm = make(LLAMA, decode_graphs=True)
    llm.generate([[1, 2, 3]] * 3, SamplingParams(max_tokens=4, ignore_eos=True))
    llm.generate([[1] * 510], SamplingParams(max_tokens=4, ignore_eos=True))
    rows = {(r["seqs"], r["max_ctx"]): r["steps"] for r in llm.explain_graphs() if r["seqs"]}
    assert rows == {(4, 512): 3, (1, 512): 2, (1, 4096): 1}
    (refused,) = [r for r in llm.explain_graphs() if not r["seqs"]]
    assert refused["reason"] == "a sequence has several new tokens" and refused["steps"] == 2


def test_a_wrong_slot_shows(make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: an unused row writes to the cache instead of nowhere."""
    idle = Buffers._idle

    def careless(self: Buffers, slot: int, seqs: int, count: int) -> None:
        idle(self, slot, seqs, count)
        self.host[slot]["slots"][:, seqs:] = 5

    without, through = both(make, LLAMA)
    monkeypatch.setattr(Buffers, "_idle", careless)
    prompts = wide({})["prompts"]
    assert through.generate(prompts, PARAMS[0]) != without.generate(prompts, PARAMS[0])


def test_a_step_that_is_refused_says_why(make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make(LLAMA, decode_graphs=True)

    def refuse(self: DecodeGraphs, *key: Any) -> Any:
        graph = original(self, *key)
        graph.reason = "no graph can hold this kernel"
        return graph

    original = DecodeGraphs._make
    monkeypatch.setattr(DecodeGraphs, "_make", refuse)
    completions = llm.generate([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
    assert completions == make(LLAMA).generate([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
    assert {
        "seqs": None,
        "tokens_per_seq": None,
        "max_ctx": None,
        "samples": None,
        "captured": False,
        "steps": 4,
        "reason": "no graph can hold this kernel",
    } in llm.explain_graphs()


def test_arenas_are_shared_but_for_zeros() -> None:
    arenas = Arenas(torch.device("cpu"))
    assert arenas.take("a", Workspace(0)) is None
    small = arenas.take("a", Workspace(100))
    assert small is arenas.take("b", Workspace(64))
    zeros = arenas.take("a", Workspace(64, zeroed=True))
    assert zeros is not small and not zeros.any()
    zeros[:8] = 7  # memory that a kernel keeps for itself is not given to another one
    other = arenas.take("b", Workspace(64, zeroed=True))
    assert other is not zeros and not other.any()
    assert arenas.take("a", Workspace(64, zeroed=True)) is zeros
    large = arenas.take("b", Workspace(101))
    assert large.numel() == 101 and large is arenas.take("a", Workspace(100))
    assert len(arenas.held()) == 3
