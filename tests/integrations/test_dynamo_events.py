"""The events of Dynamo's router, without Dynamo: before a publisher is there nothing is kept, and then it gets everything."""

from __future__ import annotations

import asyncio
from typing import Any

from gristmill.integrations.dynamo.cache_events import CacheEvents
from gristmill.runtime.async_engine import AsyncEngine
from gristmill.runtime.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored
from gristmill.runtime.sampling_params import SamplingParams
from tests.runtime.fake_runner import fake_engine


class Router:
    """A publisher with a mirror of the cache behind it."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()
        self.batches: list[list[dict[str, Any]]] = []

    def publish_batch(self, events: list[dict[str, Any]]) -> None:
        self.batches.append(events)
        for event in events:
            hashes = set(event["block_hashes"])
            if event["type"] == "stored":
                assert not hashes & self.blocks
                assert event["parent_hash"] is None or event["parent_hash"] in self.blocks
                assert len(event["token_ids"]) == sum(event["num_block_tokens"])
                self.blocks |= hashes
            else:
                assert hashes and hashes <= self.blocks
                self.blocks -= hashes


def test_a_publisher_that_comes_late() -> None:
    core, _ = fake_engine(num_blocks=64)
    events = CacheEvents(lambda: engine.resync_cache_events())
    engine = AsyncEngine(core, on_cache_events=events)
    table = core.scheduler.cache._table  # type: ignore[union-attr]

    async def ask(start: int) -> None:
        await engine.generate([*range(start, start + 20)], SamplingParams(max_tokens=5))
        await engine.call(lambda _: None)

    async def main() -> None:
        for start in range(20):  # far more blocks than the cache has
            await ask(start)
        assert not events._stored
        for _ in range(2):  # a publisher, and one that takes its place
            router = Router()
            events.attach(router)
            await ask(3)
            assert router.blocks == set(table) != set()
            await ask(21)
            assert router.blocks == set(table)
            await engine.call(lambda e: e.reset_prefix_cache())
            assert router.blocks == set() == set(table)
            await ask(5)
            assert router.blocks == set(table)
        events.close()
        count = len(router.batches)
        await ask(7)
        assert len(router.batches) == count
        await engine.close()

    asyncio.run(main())


def test_what_comes_between_attaching_and_the_first_answer() -> None:
    router = Router()
    events = CacheEvents(lambda: None)
    events([BlockStored([1], None, [1, 2], 2)])
    events.attach(router)
    events([BlockStored([2], 1, [3, 4], 2)])  # its parent is not known to the router
    assert router.batches == []
    events([BlockRemoved([1]), AllBlocksCleared(), BlockStored([5], None, [3, 4], 2)])
    assert router.blocks == {5} and len(router.batches) == 1
