"""Signals drain an engine while it serves, end it when they come twice, and are never lost."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from gristmill.runtime.async_engine import AsyncEngine
from gristmill.runtime.engine import EngineDraining
from gristmill.runtime.engine_thread import EngineDeadError
from gristmill.runtime.errors import UsageError
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import Pause
from tests.runtime.scheduler.harness import expected_ids
from tests.runtime.serving import LONG, big_engine, run, until


@pytest.mark.parametrize("signals", [1, 2])
def test_sigterm_with_200_in_flight(signals: int) -> None:
    """Every caller gets a result: complete if done by the deadline, otherwise cut short; a second signal ends
    the wait."""
    core, runner = big_engine()
    core._clock = lambda: float(runner.steps)  # time is measured in steps
    core.scheduler.pause(Pause.ALL)  # until all requests are queued

    async def main() -> None:
        async with AsyncEngine(core) as engine:
            engine.drain_on_signals(timeout=100 if signals == 1 else 1e9)
            tasks = [
                asyncio.create_task(
                    engine.generate([1, i % 40], SamplingParams(max_tokens=20 if i % 2 else 5000))
                )
                for i in range(200)
            ]
            await until(lambda: len(core.scheduler.requests) == 200)
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: core.draining)
            with pytest.raises(EngineDraining):
                await engine.generate([1], LONG)
            if signals == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            results = [one for several in await asyncio.gather(*tasks) for one in several]
            await engine.drained()
            assert [r.finish_reason for r in results[::2]] == ["abort"] * 100
            if signals == 1:
                assert {r.finish_reason for r in results[1::2]} == {"length"}
                assert all(90 < len(r.token_ids) <= 101 for r in results[::2])
            for i, result in enumerate(results):
                assert list(result.token_ids) == expected_ids([1, i % 40], len(result.token_ids))

    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    run(main(), 60)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert not core.has_unfinished() and core.scheduler.pool.num_referenced == 0


@pytest.fixture
def got() -> Iterator[list[int]]:
    """The signals that came to the handlers that the process had before."""
    numbers: list[int] = []
    before = {
        number: signal.signal(number, lambda n, _: numbers.append(n))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("end", ["close", "death", "close in another loop", "nothing"])
def test_signals_are_what_they_were_when_the_engine_has_ended(end: str, got: list[int]) -> None:
    core, runner = big_engine()
    engine = AsyncEngine(core)

    def fail() -> None:
        raise ZeroDivisionError("the kernel failed")

    async def main() -> None:
        engine.drain_on_signals()
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: core.draining)
        assert got == []
        core._draining = False
        if end == "death":
            runner.before_step = fail
            with pytest.raises(EngineDeadError, match="the kernel failed"):
                await engine.generate([1], LONG)
            with pytest.raises(EngineDeadError, match="the kernel failed"):
                engine.drain_on_signals()
        elif end == "close":
            await engine.close()
        elif end == "close in another loop":
            await asyncio.to_thread(lambda: run(engine.close()))
        if end != "nothing":
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: got == [signal.SIGTERM])
            await asyncio.sleep(0)
            assert "DrainSignals" not in repr(signal.getsignal(signal.SIGTERM))

    run(main(), 30)
    os.kill(os.getpid(), signal.SIGINT)  # the loop has ended, whatever became of the engine
    assert got[-1] == signal.SIGINT and not core.draining
    run(engine.close())


def test_a_signal_that_finds_a_dead_engine_is_not_lost(got: list[int]) -> None:
    """The engine dies between the signal and its handler in the loop."""
    core, _ = big_engine()

    async def main() -> None:
        engine = AsyncEngine(core)
        engine.drain_on_signals()
        os.kill(os.getpid(), signal.SIGTERM)
        engine._thread.die("it is over")
        await until(lambda: got == [signal.SIGTERM])
        await engine.close()

    run(main(), 30)


def test_a_second_signal_while_a_step_hangs(got: list[int]) -> None:
    core, runner = big_engine()
    hangs, release = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        release.wait(60)

    async def main() -> None:
        engine = AsyncEngine(core)
        engine.drain_on_signals(timeout=1000.0)
        tasks = [asyncio.create_task(engine.generate([1, i], LONG)) for i in range(4)]
        tasks.append(asyncio.create_task(engine.drained()))  # type: ignore[arg-type]
        await until(lambda: len(core.scheduler.running) == 4)
        runner.before_step = hang
        await asyncio.to_thread(hangs.wait)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.05)
        results = await asyncio.gather(*tasks, return_exceptions=True)  # long before the step ends
        assert not release.is_set() and core.has_unfinished()
        for result in results:
            assert isinstance(result, EngineDeadError)
            assert "after a second signal: a step began" in str(result)
        os.kill(os.getpid(), signal.SIGINT)
        await until(lambda: got == [signal.SIGINT])
        release.set()
        await engine.close()

    run(main(), 30)


def test_signals_are_taken_in_the_main_thread_alone(got: list[int]) -> None:
    core, _ = big_engine()

    async def main(engine: AsyncEngine) -> None:
        engine.drain_on_signals(timeout=5.0)

    engine = AsyncEngine(core)
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        pytest.raises(UsageError, match="call drain_on_signals in its event loop"),
    ):
        pool.submit(run, main(engine)).result()
    with pytest.raises(UsageError, match="timeout must be seconds"):
        engine.drain_on_signals(timeout=-1.0)
    run(engine.close())


def test_signals_of_two_engines_in_any_order(got: list[int]) -> None:
    """An engine that ends leaves alone what another one has installed since."""
    core, _ = big_engine()
    other, _ = big_engine()

    async def main() -> None:
        first, second = AsyncEngine(core), AsyncEngine(other)
        first.drain_on_signals()
        first.drain_on_signals()  # replaces the former ones
        second.drain_on_signals()
        await first.close()
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: other.draining)
        await second.close()
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: got == [signal.SIGTERM])

    run(main(), 30)
