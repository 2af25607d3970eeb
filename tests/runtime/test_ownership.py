"""One program at a time steps an engine: a second one is told who does and what to do, and the first one is not disturbed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from gristmill.runtime.async_engine import AsyncEngine
from gristmill.runtime.engine import Engine
from gristmill.runtime.engine_thread import EngineDeadError
from gristmill.runtime.errors import UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from tests.runtime.fake_runner import fake_engine
from tests.runtime.oracle import LLAMA
from tests.runtime.scheduler.harness import expected_ids
from tests.runtime.serving import LONG, big_engine, run, until

SHORT = SamplingParams(max_tokens=8)
SERVED = r"an AsyncEngine serves this model: .* await engine.close\(\)"


def test_generate_beside_an_async_engine(make: Callable[..., LLM]) -> None:
    llm = make(LLAMA)
    [expected] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=40))

    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            task = asyncio.create_task(engine.generate([1, 2, 3], SamplingParams(max_tokens=40)))
            await until(lambda: llm.engine.has_unfinished())
            for refused in (
                lambda: llm.generate([[4, 5]], SHORT),
                lambda: next(iter(llm.stream([[4, 5]], SHORT))),
                lambda: AsyncEngine(llm),
                lambda: AsyncEngine(llm.engine),
            ):
                with pytest.raises(UsageError, match=SERVED):
                    refused()
            [completed] = await task
            assert completed.token_ids == expected.token_ids

    run(main())
    [again] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=40))
    assert again.token_ids == expected.token_ids, "after close it is an LLM as before"


def test_an_engine_that_is_served_is_not_changed_by_others() -> None:
    core, _ = big_engine()

    async def main() -> None:
        async with AsyncEngine(core) as engine:
            task = asyncio.create_task(engine.generate([1, 2], SamplingParams(max_tokens=100)))
            await until(lambda: len(core.scheduler.running) == 1)
            changes: list[Callable[[Engine], object]] = [
                lambda e: e.add_request("mine", [1, 2]),
                lambda e: e.step(),
                lambda e: e.abort(),
                lambda e: e.sleep(),
                lambda e: e.wake_up(),
                lambda e: e.warm_up(),
                lambda e: e.update_weights("nowhere"),
                lambda e: e.reset_prefix_cache(),
                lambda e: e.record_cache_events(),
                lambda e: e.take_cache_events(),
            ]
            for change in changes:
                with pytest.raises(UsageError, match=SERVED):
                    change(core)
            assert "running: 1" in core.dump()
            await engine.call(lambda e: e.reset_prefix_cache())  # this is the way
            [completed] = await task
            assert list(completed.token_ids) == expected_ids([1, 2], 100)

    run(main())
    core.add_request("mine", [1, 2], SHORT)
    while core.has_unfinished():
        core.step()


def test_two_generates_at_the_same_time(make: Callable[..., LLM]) -> None:
    """In one thread and in two: the outputs of one would be lost to the other."""
    llm = make(LLAMA)
    [expected] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=20))
    stream = llm.stream([[1, 2, 3]], SamplingParams(max_tokens=20))
    ids = list(next(stream).token_ids)
    errors: list[Exception] = []

    def other() -> None:
        try:
            llm.generate([[4, 5]], SHORT)
        except UsageError as error:
            errors.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    other()
    with pytest.raises(UsageError, match="a generate or stream of this LLM has not ended"):
        AsyncEngine(llm)
    assert len(errors) == 2 and all("close() it first" in str(error) for error in errors)
    assert (*ids, *(token for chunk in stream for token in chunk.token_ids)) == expected.token_ids
    assert len(llm.generate([[4, 5]], SHORT)[0].token_ids) == 8
    left = llm.stream([[1, 2, 3]], SHORT)
    next(left)
    left.close()  # type: ignore[attr-defined]
    assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=20)) == [expected]


def test_a_stream_may_go_on_in_another_thread(make: Callable[..., LLM]) -> None:
    llm = make(LLAMA)

    async def main() -> int:
        stream, count = llm.stream([[1, 2, 3]], SHORT), 0
        while (chunk := await asyncio.to_thread(next, stream, None)) is not None:
            count += len(chunk.token_ids)
        return count

    assert run(main()) == 8


def test_an_engine_that_failed_is_given_back_by_close() -> None:
    core, runner = fake_engine()

    def fail() -> None:
        raise ZeroDivisionError("the kernel failed")

    async def main() -> None:
        engine = AsyncEngine(core)
        runner.before_step = fail
        with pytest.raises(EngineDeadError):
            await engine.generate([1, 2], SHORT)
        runner.before_step = lambda: None
        with pytest.raises(UsageError, match=SERVED):
            AsyncEngine(core)
        await engine.close()
        await engine.close()
        async with AsyncEngine(core) as other:
            await engine.close()  # gives nothing back that is another's
            with pytest.raises(UsageError, match=SERVED):
                core.step()
            [completed] = await other.generate([1, 2], SHORT)
            assert list(completed.token_ids) == expected_ids([1, 2], 8)

    run(main())


def test_a_thread_that_was_left_behind_keeps_its_engine() -> None:
    core, runner = big_engine()
    hangs, release = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        release.wait(60)

    async def main() -> None:
        engine = AsyncEngine(core)
        task = asyncio.create_task(engine.generate([1, 2], LONG))
        await until(lambda: len(core.scheduler.running) == 1)
        runner.before_step = hang
        await asyncio.to_thread(hangs.wait)
        await engine.close(timeout=0.05)
        with pytest.raises(EngineDeadError):
            await task
        with pytest.raises(UsageError, match="has left a thread behind which has not ended its last step"):
            AsyncEngine(core)
        release.set()
        runner.before_step = lambda: None
        await engine.close()
        await AsyncEngine(core).close()

    run(main(), 30)


def test_an_async_engine_that_was_refused_owns_nothing() -> None:
    core, _ = fake_engine(prefix_caching=False)
    with pytest.raises(UsageError, match="no prefix cache"):
        AsyncEngine(core, on_cache_events=print)
    run(AsyncEngine(core).close())
