"""Events of the prefix cache: a mirror that is built from them equals the cache after any work."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from gristmill.runtime.async_engine import AsyncEngine
from gristmill.runtime.engine import Engine
from gristmill.runtime.engine_thread import EngineDeadError
from gristmill.runtime.errors import UsageError
from gristmill.runtime.kv_cache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEvent,
    EventLog,
)
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from tests.runtime.fake_runner import fake_engine
from tests.runtime.oracle import LLAMA, window
from tests.runtime.scheduler.harness import VOCAB

PARAMS = SamplingParams(max_tokens=9, ignore_eos=True)


class Mirror:
    """What a router knows: hash -> (parent, tokens of the block)."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    def apply(self, events: list[CacheEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                parent, size = event.parent_block_hash, event.block_size
                assert len(event.token_ids) == size * len(event.block_hashes)
                for index, hash_ in enumerate(event.block_hashes):
                    assert hash_ not in self.blocks
                    self.blocks[hash_] = (parent, tuple(event.token_ids[index * size : (index + 1) * size]))
                    parent = hash_
            elif isinstance(event, BlockRemoved):
                for hash_ in event.block_hashes:
                    del self.blocks[hash_]
            else:
                assert isinstance(event, AllBlocksCleared)
                self.blocks.clear()


def cached(engine: Engine) -> dict[int, tuple[int | None, tuple[int, ...]]]:
    assert engine.scheduler.cache is not None
    table = engine.scheduler.cache._table
    return {h: (None if e.parent is None else e.parent.hash, e.tokens) for h, e in table.items()}


@pytest.mark.parametrize("seed", range(4))
def test_the_mirror_equals_the_cache(seed: int) -> None:
    engine, _ = fake_engine(num_blocks=24, max_seqs=4)
    engine.record_cache_events()
    rng, mirror = random.Random(seed), Mirror()
    kinds: set[type] = set()
    stems = [[rng.randrange(VOCAB) for _ in range(12)] for _ in range(3)]
    for step in range(300):
        if rng.random() < 0.5:
            tail = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))]
            engine.add_request(str(step), rng.choice(stems) + tail, PARAMS)
        if rng.random() < 0.02:
            engine.reset_prefix_cache()
        engine.step()
        events = engine.take_cache_events()
        kinds |= {type(event) for event in events}
        mirror.apply(events)
        assert mirror.blocks == cached(engine)
        engine.scheduler.check()
    assert kinds == {BlockStored, BlockRemoved, AllBlocksCleared} and engine.take_cache_events() == []


@pytest.mark.parametrize("seed", range(4))
def test_events_that_nobody_takes_are_bounded(seed: int) -> None:
    """What is taken late, and what is recorded late, is what the cache holds, and then what changes."""
    engine, _ = fake_engine(num_blocks=24, max_seqs=4)
    rng, mirror = random.Random(seed), Mirror()
    for step in range(600):
        if rng.random() < 0.5:
            tokens = [rng.randrange(4) for _ in range(rng.randrange(8, 30))]
            engine.add_request(str(step), tokens, PARAMS)
        engine.step()
        if step == 50 or (step > 50 and rng.random() < 0.005):
            engine.record_cache_events()  # for a router that begins anew
        if step > 50 and rng.random() < 0.02:
            events = engine.take_cache_events()
            blocks = sum(
                len(event.block_hashes) for event in events if not isinstance(event, AllBlocksCleared)
            )
            assert blocks <= 24
            mirror.apply(events)
            assert mirror.blocks == cached(engine)
    engine.record_cache_events(False)
    engine.reset_prefix_cache()
    assert engine.take_cache_events() == []


def test_what_a_cache_holds_comes_with_parents_first() -> None:
    engine, _ = fake_engine(num_blocks=64, max_seqs=4)
    for name, tail in (("a", [1] * 9), ("b", [2] * 9), ("c", [1] * 5 + [3] * 8)):
        engine.add_request(name, [*range(12), *tail], PARAMS)
        while engine.has_unfinished():
            engine.step()
    engine.record_cache_events()
    cleared, *stored = engine.take_cache_events()
    known: set[int | None] = {None}
    for event in stored:
        assert isinstance(event, BlockStored) and event.parent_block_hash in known
        known.update(event.block_hashes)
    assert isinstance(cleared, AllBlocksCleared) and known - {None} == set(cached(engine))
    assert engine.take_cache_events() == []


def test_one_event_for_the_blocks_of_a_prompt(make: Callable[..., LLM]) -> None:
    engine = make(LLAMA, block_size=16).engine
    assert engine.take_cache_events() == []
    engine.record_cache_events()
    prompt = window(2, 50)
    engine.add_request("a", prompt, SamplingParams(max_tokens=1))
    while engine.has_unfinished():
        engine.step()
    [event] = engine.take_cache_events()
    assert isinstance(event, BlockStored) and len(set(event.block_hashes)) == 3
    assert event.token_ids == prompt[:48] and event.parent_block_hash is None and event.block_size == 16
    engine.add_request("b", prompt[:32] + [5] * 17, SamplingParams(max_tokens=1))
    while engine.has_unfinished():
        engine.step()
    [other] = engine.take_cache_events()
    assert isinstance(other, BlockStored) and other.parent_block_hash == event.block_hashes[1]
    assert other.token_ids == [5] * 16


def test_the_log_joins_neighbours_alone() -> None:
    log = EventLog()
    log.stored(1, None, [1, 2], None)
    log.stored(2, 1, [3, 4], None)
    log.stored(3, 2, [3, 4], "adapter")
    log.removed(7)
    log.removed(8)
    log.stored(4, 3, [5, 6], "adapter")
    assert log.take() == [
        BlockStored([1, 2], None, [1, 2, 3, 4], 2),
        BlockStored([3], 2, [3, 4], 2, "adapter"),
        BlockRemoved([7, 8]),
        BlockStored([4], 3, [5, 6], 2, "adapter"),
    ]
    assert log.take() == []


def test_a_callback_of_the_async_engine(make: Callable[..., LLM]) -> None:
    llm, mirror = make(LLAMA), Mirror()

    async def main() -> None:
        async with AsyncEngine(llm, on_cache_events=mirror.apply) as engine:
            await asyncio.gather(*(engine.generate(window(i, 40), PARAMS) for i in range(3)))
            await engine.check_health()
            assert mirror.blocks == cached(llm.engine) and len(mirror.blocks) == 9
            await engine.call(lambda e: e.reset_prefix_cache())
            assert mirror.blocks == {}

    asyncio.run(main())
    llm.generate([window(1, 40)], PARAMS)
    assert llm.engine.take_cache_events() == [], "after close nothing is recorded"


def test_a_callback_that_begins_late(make: Callable[..., LLM], caplog: pytest.LogCaptureFixture) -> None:
    llm, events = make(LLAMA), list[CacheEvent]()
    llm.generate([window(1, 40)], PARAMS)

    async def main() -> None:
        async with AsyncEngine(llm, on_cache_events=events.extend) as engine:
            for _ in range(2):
                engine.resync_cache_events()
                await engine.check_health()
                mirror = Mirror()
                mirror.apply(events)
                assert isinstance(events[0], AllBlocksCleared) and mirror.blocks == cached(llm.engine) != {}
            with pytest.raises(UsageError, match="on_cache_events"):
                engine._on_cache_events = None
                engine.resync_cache_events()
            engine._on_cache_events = raises
            engine.resync_cache_events()
            await engine.check_health()  # it goes on
        with pytest.raises(EngineDeadError):
            engine.resync_cache_events()

    def raises(_: list[CacheEvent]) -> None:
        raise ZeroDivisionError("the router has left")

    asyncio.run(main())
    assert "on_cache_events failed: ZeroDivisionError: the router has left" in caplog.text


def test_without_a_prefix_cache(make: Callable[..., LLM]) -> None:
    engine = make(LLAMA, enable_prefix_cache=False).engine
    engine.reset_prefix_cache()
    assert engine.take_cache_events() == []
    with pytest.raises(UsageError, match="enable_prefix_cache is False"):
        engine.record_cache_events()
