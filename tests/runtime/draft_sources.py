"""Proposers for the tests: right, wrong, random and hostile ones, which know the ids that will come."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gristmill.runtime.engine import Engine
from gristmill.runtime.speculation import DraftRequest

Known = Mapping[str, Sequence[int]]
"""Request id -> its output without drafts."""


class Source:
    """Drafts by a function of (the ids that will come, as far as they are known; how many drafts are taken; the request)."""

    runner = None

    def __init__(self, known: Known, draft: Callable[[list[int], int, DraftRequest], list[int]]) -> None:
        self.known, self.draft = known, draft
        self.asked = 0
        self.ended_ids: list[str] = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        self.asked += len(requests)
        drafts = []
        for request in requests:
            output = list(request.tokens[request.prompt_len :])
            known = list(self.known.get(request.id, ()))
            assert known[: len(output)] == output[: len(known)], "ids changed before these drafts"
            drafts.append(self.draft(known[len(output) :], request.count, request))
        return drafts

    def ended(self, request_id: str, tokens: Sequence[int], prompt_len: int) -> None:
        self.ended_ids.append(request_id)

    def reset(self) -> None:
        pass


def sources(known: Known, vocab_size: int, seed: int = 0) -> dict[str, Source]:
    """Returns one proposer of each kind."""
    rng = random.Random(seed)

    def right(coming: list[int], count: int, request: DraftRequest) -> list[int]:
        return coming[:count]

    def wrong(coming: list[int], count: int, request: DraftRequest) -> list[int]:
        return [(token + 1) % vocab_size for token in coming[:count]]

    def anything(coming: list[int], count: int, request: DraftRequest) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(rng.randint(0, count))]

    def partly(coming: list[int], count: int, request: DraftRequest) -> list[int]:
        drafts = coming[:count]
        if drafts and rng.random() < 0.7:
            place = rng.randrange(len(drafts))
            drafts[place] = (drafts[place] + 7) % vocab_size
        return drafts

    def hostile(coming: list[int], count: int, request: DraftRequest) -> list[int]:
        """Too many drafts, end tokens, ids outside the vocabulary, and right ones behind all that."""
        return [*coming[: rng.randint(0, 2)], rng.choice([1, -1, vocab_size, 1 << 40]), *coming, *range(90)]

    kinds = (right, wrong, anything, partly, hostile)
    return {kind.__name__: Source(known, kind) for kind in kinds}


def use(engine: Engine, source: Any) -> Any:
    """Lets the engine draft by another proposer, and checks scheduler and blocks after every step; returns the proposer."""
    assert engine.speculator is not None
    engine.speculator.proposer = source
    step, scheduler = engine.step, engine.scheduler

    def checked() -> Any:
        outputs = step()
        scheduler.check()
        size, groups = scheduler.config.block_size, len(scheduler.config.windows)
        for request in scheduler.requests.values():
            known = len(request.tokens) + request.pending
            spare = len(request.block_ids) // groups - -(-known // size)
            assert spare <= -(-engine.speculator.config.most_tokens // size), "rejected drafts keep blocks"  # type: ignore[union-attr]
        return outputs

    engine.step = checked  # type: ignore[method-assign]
    return source
