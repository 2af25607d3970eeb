"""What the host does in a decode step does not grow with the contexts: it reads new tokens and new blocks, never those before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from gristmill.runtime.engine import Engine
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import Request
from tests.runtime.oracle import LLAMA

CONTEXT, STEPS, BLOCK = 700, 40, 16
KINDS = (
    SamplingParams(max_tokens=STEPS, ignore_eos=True),
    SamplingParams(max_tokens=STEPS, ignore_eos=True, temperature=1.0, top_p=0.9, seed=1),
    SamplingParams(max_tokens=STEPS, ignore_eos=True, repetition_penalty=1.2, min_tokens=30),
    SamplingParams(max_tokens=STEPS, ignore_eos=True, logprobs=2, bad_words=((5, 6),)),
)


class Counted(list[Any]):
    """A list that counts the elements that are read of it."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        Counted.reads += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self) -> Iterator[Any]:
        Counted.reads += len(self)
        return super().__iter__()

    def __reversed__(self) -> Iterator[Any]:
        Counted.reads += len(self)
        return super().__reversed__()

    def __contains__(self, value: object) -> bool:
        Counted.reads += len(self)
        return super().__contains__(value)

    def __add__(self, other: Any) -> Any:
        Counted.reads += len(self)
        return super().__add__(other)

    def copy(self) -> Any:
        return self[:]

    def count(self, value: object) -> int:
        Counted.reads += len(self)
        return super().count(value)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests whose tokens and block tables are counted."""
    make = Request.__init__

    def init(self: Request, *given: Any, **named: Any) -> None:
        make(self, *given, **named)
        self.tokens, self.block_ids = Counted(self.tokens), Counted()

    monkeypatch.setattr(Request, "__init__", init)


def reads_by_step(engine: Engine, kinds: Sequence[SamplingParams] = KINDS) -> list[int]:
    """Elements read in each step, of which the first one has all prompts."""
    for name, params in enumerate(kinds):
        engine.add_request(str(name), [name, *range(1, CONTEXT)], params)
    found = []
    while engine.has_unfinished():
        Counted.reads = 0
        engine.step()
        found.append(Counted.reads)
    return found


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("ahead", [False, True])
def test_steps_read_what_is_new(
    ahead: bool, make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(LLAMA, async_steps=ahead, max_batch_tokens=4096, max_seqs=4)
    first, *decodes = reads_by_step(llm.engine)
    assert first > len(KINDS) * CONTEXT and len(decodes) >= STEPS - 1
    most = len(KINDS) * 4 * BLOCK  # a block of tokens is hashed, and kept; some steps read the last token
    assert max(decodes[1:]) <= most, decodes

    update = llm.engine.scheduler.update

    def planted(*given: Any) -> Any:
        requests = llm.engine.scheduler.requests.values()
        return [list(request.tokens) for request in requests] and update(*given)

    monkeypatch.setattr(llm.engine.scheduler, "update", planted)
    assert max(reads_by_step(llm.engine)[2:]) > most


@pytest.mark.usefixtures("counted")
def test_a_prompt_that_waits_for_blocks_is_not_read(make: Callable[..., LLM]) -> None:
    """Most of it is in the prefix cache. It is looked up when it is tried first, and when it is admitted."""
    blocks = 2 * (CONTEXT // BLOCK) - 4
    llm = make(LLAMA, num_blocks=blocks, max_batch_tokens=4096, max_seqs=2, async_steps=False)
    for name in range(2):
        llm.generate([[name, *range(1, CONTEXT)]], SamplingParams(max_tokens=1))
    found = reads_by_step(llm.engine, KINDS[:2])
    assert len(found) >= 2 * STEPS, "one after the other"
    assert sum(reads > CONTEXT // 2 for reads in found) == 2, (
        found
    )  # the first step, and when the first request has ended
