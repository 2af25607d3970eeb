"""How many requests may wait for an `AsyncEngine`."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gristmill.runtime.async_engine import AsyncEngine
from gristmill.runtime.errors import UsageError
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import Pause, QueueFull
from tests.runtime.serving import big_engine, run, until


def test_the_queue_has_a_bound_by_default() -> None:
    """Also while a step hangs and the engine takes nothing. An engine that is used without a front takes any number."""
    core, runner = big_engine(max_seqs=1)
    release = threading.Event()

    async def main() -> None:
        async with AsyncEngine(core) as engine:
            running = asyncio.create_task(engine.generate([1, 2], SamplingParams(max_tokens=5)))
            runner.before_step = lambda: release.wait(60) and None  # type: ignore[func-returns-value]
            await until(lambda: len(core.scheduler.requests) == 1)
            tasks = [
                asyncio.create_task(engine.generate([3], SamplingParams(max_tokens=1))) for _ in range(3000)
            ]
            await until(lambda: sum(task.done() for task in tasks) >= 1976)
            refused = [task for task in tasks if task.done()]
            assert 1976 <= len(refused) <= 1977  # the first one may wait, too
            for task in refused:
                with pytest.raises(QueueFull, match="1024 requests are waiting, which is max_queued"):
                    await task
            # A caller that leaves makes room, whether the engine has its request or not.
            waiting = [task for task in tasks if not task.done()]
            for task in waiting[10:]:
                task.cancel()
            await asyncio.gather(*waiting[10:], return_exceptions=True)
            release.set()
            await asyncio.gather(running, *waiting[:10])
            await engine.call(lambda _: None)  # after those who have left
            core.scheduler.pause(Pause.ALL)
            again = [
                asyncio.create_task(engine.generate([3], SamplingParams(max_tokens=1, n=2)))
                for _ in range(513)
            ]
            await until(lambda: any(task.done() for task in again))
            with pytest.raises(QueueFull, match="1024 requests are waiting"):
                await again[512]
            await engine.resume()
            assert len(await asyncio.gather(*again[:512])) == 512

    run(main(), 60)
    for number in range(1500):
        core.add_request(str(number), [1])
    core.abort()


@pytest.mark.parametrize(
    ("own", "given", "limit"), [(None, 3, 3), (2, 3, 2), (4, None, 4), (None, None, 2000)]
)
def test_whose_bound_of_the_queue_counts(own: int | None, given: int | None, limit: int) -> None:
    core, _ = big_engine(max_queued=own)
    core.scheduler.pause(Pause.ALL)

    async def main() -> None:
        async with AsyncEngine(core, max_queued=given) as engine:
            tasks = [
                asyncio.create_task(engine.generate([3], SamplingParams(max_tokens=1))) for _ in range(limit)
            ]
            await until(lambda: len(core.scheduler.waiting) == limit)
            if limit < 2000:
                with pytest.raises(QueueFull):
                    await engine.generate([3])
            await engine.resume()
            await asyncio.gather(*tasks)

    run(main())
    with pytest.raises(UsageError, match="max_queued must be an integer of at least 1"):
        AsyncEngine(core, max_queued=0)
