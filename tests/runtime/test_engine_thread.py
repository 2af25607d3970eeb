"""The engine's thread: calls between steps, and a watchdog over everything that it does."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from gristmill.runtime import engine_thread
from gristmill.runtime.async_engine import AsyncEngine
from gristmill.runtime.engine import Engine
from gristmill.runtime.engine_thread import EngineDeadError
from gristmill.runtime.errors import UsageError
from gristmill.runtime.sampling_params import SamplingParams
from tests.runtime.scheduler.harness import expected_ids
from tests.runtime.serving import LONG, big_engine, run, until


class Clock:
    """The time of the watchdog, which passes when a test says so: what a busy machine makes slow is not taken for what hangs."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(engine_thread, "time", SimpleNamespace(monotonic=made.monotonic))
    return made


def test_a_wait_that_begins_while_the_last_step_runs_gets_its_error() -> None:
    core, runner = big_engine()
    in_step, release = threading.Event(), threading.Event()

    async def main() -> None:
        engine = AsyncEngine(core)
        task = asyncio.create_task(engine.generate([1, 2], LONG))
        await until(lambda: len(core.scheduler.running) == 1)

        def fail() -> None:
            in_step.set()
            release.wait(60)
            raise ZeroDivisionError("the kernel failed")

        runner.before_step = fail
        await asyncio.to_thread(in_step.wait)
        waiting = asyncio.create_task(engine.drained())
        await asyncio.sleep(0.05)
        release.set()
        results = await asyncio.gather(task, waiting, return_exceptions=True)
        assert all(isinstance(result, EngineDeadError) for result in results)
        await engine.close()

    run(main(), 30)


def test_a_step_that_hangs_is_seen_by_the_watchdog(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    core, runner = big_engine()
    hangs, release = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        release.wait(60)

    async def main() -> None:
        engine = AsyncEngine(core, watchdog_seconds=1.0)
        tasks = [asyncio.create_task(engine.generate([1, i], LONG)) for i in range(8)]
        await until(lambda: len(core.scheduler.running) == 8)
        runner.before_step = hang
        await asyncio.to_thread(hangs.wait)
        dump = engine.dump()
        clock.now += 1.5
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(r, EngineDeadError) and "has not ended for 1.0 s" in str(r) for r in results)
        assert "running: 8" in dump
        await engine.close(timeout=0.1)
        release.set()
        await until(lambda: not engine._thread._thread.is_alive())

    run(main(), 30)
    assert "release.wait(60)" in caplog.text, "the log does not say where the step hangs"


@pytest.mark.parametrize("what", ["a call", "the callbacks of a step"])
def test_whatever_hangs_is_seen_by_the_watchdog(what: str, clock: Clock) -> None:
    core, _ = big_engine()
    hang, hangs, release = threading.Event(), threading.Event(), threading.Event()

    def blocks(_: Any) -> None:
        if hang.is_set():
            hangs.set()
            release.wait(60)

    async def main() -> None:
        on_events = blocks if what == "the callbacks of a step" else None
        engine = AsyncEngine(core, watchdog_seconds=0.5, on_cache_events=on_events)
        tasks = [asyncio.create_task(engine.generate([1, 2], LONG))]
        await until(lambda: len(core.scheduler.running) == 1)
        hang.set()
        if what == "a call":
            tasks += [asyncio.create_task(engine.call(blocks)) for _ in range(2)]  # one runs, one is queued
            await asyncio.sleep(0)
        await asyncio.to_thread(hangs.wait)
        clock.now += 0.75
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            assert isinstance(result, EngineDeadError) and str(result) == f"{what} has not ended for 0.5 s"
        release.set()
        await engine.close()
        with pytest.raises(EngineDeadError, match=what):
            await engine.generate([1], LONG)

    run(main(), 30)


def test_a_call_may_have_more_time_than_a_step(clock: Clock) -> None:
    core, _ = big_engine()
    release = threading.Event()

    def takes(seconds: float) -> int:
        """As long for the watchdog, which has time to notice that."""
        clock.now += seconds
        time.sleep(0.7)
        return 5

    def hangs(_: Any) -> None:
        clock.now += 0.5
        release.wait(60)

    async def main() -> None:
        async with AsyncEngine(core, watchdog_seconds=0.3) as engine:
            assert await engine.call(lambda _: takes(59), watchdog_seconds=60.0) == 5
            assert len(await engine.generate([1, 2], SamplingParams(max_tokens=20))) == 1
            with pytest.raises(UsageError, match="watchdog_seconds of a call must be at least 0"):
                await engine.call(lambda _: None, watchdog_seconds=-1.0)
            with pytest.raises(EngineDeadError, match=r"a call has not ended for 0.3 s"):
                await engine.call(hangs)
            release.set()

    run(main(), 30)


@pytest.mark.parametrize(
    "kind", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError]
)
def test_what_a_call_raises_is_its_callers(kind: type[BaseException]) -> None:
    core, _ = big_engine()

    def raises(_: Engine) -> None:
        raise kind("no")

    async def main() -> None:
        async with AsyncEngine(core) as engine:
            other = asyncio.create_task(engine.generate([1, 2], SamplingParams(max_tokens=200)))
            await until(lambda: len(core.scheduler.running) == 1)
            with pytest.raises(kind):
                await engine.call(raises)
            [completed] = await other
            assert list(completed.token_ids) == expected_ids([1, 2], 200)
            with pytest.raises(RuntimeError, match="StopIteration"):
                await engine.call(lambda _: next(iter(())))

    run(main(), 30)


def test_close_ends_a_call_that_hangs() -> None:
    core, _ = big_engine()
    release, begun = threading.Event(), threading.Event()

    async def main() -> None:
        engine = AsyncEngine(core)
        tasks = [asyncio.create_task(engine.call(lambda _: (begun.set(), release.wait(60))))]
        tasks.append(asyncio.create_task(engine.call(lambda e: e.status())))  # type: ignore[arg-type]
        await asyncio.to_thread(begun.wait)
        await engine.close(timeout=0.1)
        for task in tasks:
            with pytest.raises(EngineDeadError, match="the engine was closed"):
                await task
        release.set()

    run(main(), 30)


def test_a_flood_of_calls_does_not_stop_the_steps() -> None:
    """Each call queues another one, so that the queue is never empty."""
    core, _ = big_engine()

    async def main() -> None:
        async with AsyncEngine(core) as engine:
            flooding = True

            def again(_: Engine) -> None:
                if flooding:
                    engine._thread.call(again)

            engine._thread.call(again)
            [completed] = await engine.generate([1, 2], SamplingParams(max_tokens=50))
            flooding = False
            assert list(completed.token_ids) == expected_ids([1, 2], 50)

    run(main(), 60)
