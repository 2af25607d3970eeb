"""AsyncEngine gives the answers of LLM.generate to any number of callers. Whatever is cancelled, fails, hangs
or is stopped, no caller hangs."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from gristmill.runtime.async_engine import AsyncEngine
from gristmill.runtime.completion import Chunk, GrowingCompletion
from gristmill.runtime.engine import Engine, EngineDraining
from gristmill.runtime.engine_thread import EngineDeadError
from gristmill.runtime.errors import UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import Pause, QueueFull, RequestTooLarge
from tests.runtime import oracle
from tests.runtime.fake_runner import fake_engine
from tests.runtime.oracle import LLAMA
from tests.runtime.scheduler.harness import expected_ids
from tests.runtime.serving import LONG, big_engine, collect, run, until

TEXT = "The CREATE INDEX statement"


def test_32_streams_are_what_generate_says(make: Callable[..., LLM]) -> None:
    llm = make(LLAMA, max_seqs=12)
    prompts = [oracle.eval_tokens()[50 * i :][: 3 + i] for i in range(30)] + [TEXT, TEXT]  # type: ignore[list-item]
    kinds = [
        SamplingParams(max_tokens=12),
        SamplingParams(max_tokens=9, temperature=1.0, seed=4, logprobs=2),
        SamplingParams(max_tokens=14, repetition_penalty=1.3, stop=["e", "the"]),
        SamplingParams(max_tokens=6, temperature=1.2, seed=8, n=3, min_tokens=2),
    ]
    params = [kinds[i % 4] for i in range(32)]
    expected = llm.generate(prompts, params)  # type: ignore[arg-type]

    async def main() -> list[list[Any]]:
        async with AsyncEngine(llm) as engine:
            return await asyncio.gather(
                *(engine.generate(prompt, wish) for prompt, wish in zip(prompts, params, strict=True))
            )

    actual = [one for several in run(main()) for one in several]
    assert [(o.token_ids, o.text, o.finish_reason, o.stop_reason, o.choice) for o in actual] == [
        (o.token_ids, o.text, o.finish_reason, o.stop_reason, o.choice) for o in expected
    ]
    for one, other in zip(actual, expected, strict=True):
        assert (one.logprobs is None) == (other.logprobs is None)
        for streamed, generated in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert streamed.logprob == pytest.approx(generated.logprob, abs=1e-4)
    assert not llm.engine.has_unfinished()
    llm.engine.scheduler.check()


def test_streams_come_in_pieces_and_leaving_aborts(make: Callable[..., LLM]) -> None:
    llm = make(LLAMA)
    [expected] = llm.generate(TEXT, SamplingParams(max_tokens=20))

    async def main() -> None:
        engine = AsyncEngine(llm)
        chunks = await collect(engine, TEXT, SamplingParams(max_tokens=20))
        assert "".join(chunk.text for chunk in chunks) == expected.text
        assert tuple(t for chunk in chunks for t in chunk.token_ids) == expected.token_ids
        stream = engine.stream(TEXT, LONG)
        await anext(stream)
        assert llm.engine.has_unfinished()
        await stream.aclose()
        await until(lambda: not llm.engine.has_unfinished())
        await engine.close()

    run(main())
    llm.engine.scheduler.check()
    assert llm.generate(TEXT, SamplingParams(max_tokens=20)) == [expected], (
        "after close it is an LLM as before"
    )


def test_a_whole_stream_is_one_chunk_of_each_completion(make: Callable[..., LLM]) -> None:
    """Which are the chunks of the same stream, joined. With a stop string it comes in several."""
    llm = make(LLAMA)
    two = SamplingParams(max_tokens=9, n=2, temperature=1.0, seed=3, logprobs=2, prompt_logprobs=1)
    stopped = SamplingParams(max_tokens=20, stop=["\0 never"])

    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            pieces = await collect(engine, TEXT, two)
            whole = [chunk async for chunk in engine.stream(TEXT, two, whole=True)]
            assert len(pieces) > 4 and len(whole) == 2
            for chunk in whole:
                growing = GrowingCompletion()
                for piece in pieces:
                    if piece.choice == chunk.choice:
                        growing.add(piece)
                assert chunk == growing.chunk()
            assert len([chunk async for chunk in engine.stream(TEXT, stopped, whole=True)]) > 2

    run(main())


def test_cancelled_callers_leave_nothing_behind() -> None:
    core, _ = big_engine()

    async def main() -> None:
        async with AsyncEngine(core) as engine:
            tasks = [asyncio.create_task(engine.generate([1, 2, i % 40], LONG)) for i in range(40)]
            other = asyncio.create_task(engine.generate([5, 6], SamplingParams(max_tokens=30)))
            await until(lambda: len(core.scheduler.running) > 30)
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(result, asyncio.CancelledError) for result in results)
            [completed] = await other
            assert list(completed.token_ids) == expected_ids([5, 6], 30)
            early = asyncio.create_task(engine.generate([1], LONG))
            await asyncio.sleep(0)
            early.cancel()  # before the engine has the request
            await until(lambda: early.done() and not core.has_unfinished())
            assert not engine._requests

    run(main())
    assert core.scheduler.pool.num_referenced == 0


def test_a_generator_that_nobody_closes_aborts_its_request() -> None:
    core, _ = big_engine()

    async def main() -> None:
        async with AsyncEngine(core) as engine:
            async for _ in engine.stream([1, 2], LONG):
                break
            await until(lambda: not core.has_unfinished())

    run(main())


def test_abort_by_name_ends_the_stream_in_order() -> None:
    core, _ = big_engine()

    async def main() -> None:
        async with AsyncEngine(core) as engine:
            task = asyncio.create_task(
                collect(engine, [1, 2], SamplingParams(max_tokens=9000, n=2), request_id="x")
            )
            await until(lambda: len(core.scheduler.running) == 2)
            with pytest.raises(UsageError, match="'x' is in use"):
                await engine.generate([1], LONG, request_id="x")
            assert await engine.abort("x") and not await engine.abort("x")
            chunks = await task
            assert [c.finish_reason for c in chunks if c.finish_reason] == ["abort", "abort"]
            assert core.scheduler.pool.num_referenced == 0

    run(main())


def test_refused_requests_do_not_disturb_the_others() -> None:
    core, runner = fake_engine(num_blocks=64, max_seqs=1, max_queued=2)
    refused = threading.Event()
    runner.before_step = lambda: refused.wait(0.1) and None  # type: ignore[func-returns-value]  # the other one goes on all the time

    async def main() -> None:
        async with AsyncEngine(core) as engine:
            running = asyncio.create_task(engine.generate([1, 2], SamplingParams(max_tokens=200)))
            await until(lambda: len(core.scheduler.running) == 1)
            with pytest.raises(QueueFull):
                # Two fit, the third does not: none is accepted.
                await engine.generate([3], SamplingParams(max_tokens=5, n=3))
            assert len(core.scheduler.requests) == 1
            for prompt, params, error in (
                ([1] * 300, None, RequestTooLarge),
                ([], None, UsageError),
                ([99], None, UsageError),
                ("text", None, UsageError),
                (5, None, UsageError),
                ([1], {}, UsageError),
                ([1], SamplingParams(stop=["a"]), UsageError),
            ):
                with pytest.raises(error):
                    await engine.generate(prompt, params)  # type: ignore[arg-type]
            assert not running.done()
            refused.set()
            [completed] = await running
            assert list(completed.token_ids) == expected_ids([1, 2], 200)
            assert not engine._requests

    run(main())


def test_a_slow_reader_gets_fewer_chunks_and_every_token() -> None:
    core, _ = big_engine()

    def chunks() -> int:
        return sum(type(one) is Chunk for one in gc.get_objects())

    before = chunks()

    async def main() -> None:
        async with AsyncEngine(core) as engine:
            stream = engine.stream([1, 2], SamplingParams(max_tokens=400))
            actual = list((await anext(stream)).token_ids)
            await until(lambda: not core.has_unfinished())
            await engine.call(lambda _: None)  # what the engine's thread sent before has arrived
            waiting = chunks() - before
            assert waiting <= 2, f"{waiting} chunks wait for the reader"
            rest = [chunk async for chunk in stream]
            assert len(rest) == 1 and rest[0].finish_reason == "length"
            assert actual + list(rest[0].token_ids) == expected_ids([1, 2], 400)

    run(main())


def test_a_step_that_raises_reaches_every_waiter(caplog: pytest.LogCaptureFixture) -> None:
    core, runner = big_engine()

    async def main() -> None:
        engine = AsyncEngine(core)
        tasks = [asyncio.create_task(engine.generate([1, i % 50], LONG)) for i in range(20)]
        await until(lambda: len(core.scheduler.running) == 20)
        pause = asyncio.create_task(engine.pause("wait"))

        def fail() -> None:
            raise ZeroDivisionError("the kernel failed")

        runner.before_step = fail
        results = await asyncio.gather(*tasks, pause, return_exceptions=True)
        for result in results:
            assert isinstance(result, EngineDeadError) and isinstance(result.__cause__, ZeroDivisionError)
            assert "a step failed: ZeroDivisionError: the kernel failed" in str(result)
        for later in (engine.generate([1], LONG), engine.pause(), engine.drain(), engine.abort("x")):
            with pytest.raises(EngineDeadError, match="the kernel failed"):
                await later
        assert engine.error is not None and not engine._requests
        assert "running: 20" in engine.dump()
        await engine.close()

    with caplog.at_level(logging.ERROR, logger="gristmill"):
        run(main())
    [record] = [record for record in caplog.records if record.name.startswith("gristmill")]
    assert "the kernel failed" in record.getMessage() and "running: 20" in record.getMessage()


def test_an_invariant_that_fails_leaves_a_dump(caplog: pytest.LogCaptureFixture) -> None:
    core, _ = big_engine()

    async def main() -> None:
        engine = AsyncEngine(core)
        core.scheduler._builder = lambda: Nothing()  # type: ignore[method-assign,assignment,return-value]
        with pytest.raises(EngineDeadError, match="SchedulerStuck"):
            await engine.generate([1, 2], LONG)
        await engine.close()

    class Nothing:
        def run(self, running: Any, waiting: Any) -> Any:
            from gristmill.runtime.scheduler import ScheduledStep

            return ScheduledStep(0)

    run(main())
    assert "waiting: 1" in caplog.text and "Request('async-0'" in caplog.text


def test_close_ends_everything() -> None:
    core, _ = big_engine()

    async def main() -> None:
        engine = AsyncEngine(core)
        task = asyncio.create_task(engine.generate([1, 2], LONG))
        await until(lambda: len(core.scheduler.running) == 1)
        waiting = asyncio.create_task(engine.drained())
        await asyncio.sleep(0.02)
        await engine.close()
        for ended in (task, waiting):
            with pytest.raises(EngineDeadError, match="the engine was closed"):
                await ended
        with pytest.raises(EngineDeadError, match="closed"):
            await engine.generate([1], LONG)
        await engine.close()
        assert not core.has_unfinished() and core.scheduler.pool.num_referenced == 0

    run(main())


def test_pause_and_resume() -> None:
    core, runner = big_engine(max_seqs=2)
    go = threading.Event()
    runner.before_step = lambda: go.wait(60) and None  # type: ignore[func-returns-value]
    core.scheduler.pause(Pause.ALL)  # until all are queued

    async def main() -> None:
        async with AsyncEngine(core) as engine:
            params = SamplingParams(max_tokens=200)
            first = [asyncio.create_task(engine.generate([1, i], params)) for i in range(3)]
            await until(lambda: len(core.scheduler.waiting) == 3)
            await engine.resume()
            await until(lambda: len(core.scheduler.running) == 2)
            paused = asyncio.create_task(engine.pause("keep"))
            await asyncio.sleep(0)  # the call is queued before the first step ends
            go.set()
            await paused
            steps = runner.steps
            await asyncio.sleep(0.05)
            assert runner.steps == steps and not any(task.done() for task in first)
            await engine.resume()
            await engine.pause("wait")
            assert [task.done() for task in first[2:]] == [False] and not core.scheduler.running
            later = asyncio.create_task(engine.generate([7], params))
            await until(lambda: len(core.scheduler.waiting) == 2)
            await engine.resume()
            result = [one.token_ids for task in [*first, later] for one in await task]
            assert result == [tuple(expected_ids(p, 200)) for p in ([1, 0], [1, 1], [1, 2], [7])]
            aborted = asyncio.create_task(engine.generate([1], LONG))
            await until(lambda: len(core.scheduler.running) == 1)
            await engine.pause("abort")
            assert [one.finish_reason for one in await aborted] == ["abort"]
            await engine.pause("abort")  # nothing to abort: returns at once
            await engine.resume()
            await engine.drain()
            with pytest.raises(EngineDraining):
                await engine.generate([1], LONG)

    run(main())


def test_callers_in_several_event_loops() -> None:
    core, _ = big_engine()
    answers: dict[int, list[Any]] = {}

    async def clients(engine: AsyncEngine, number: int) -> None:
        params = SamplingParams(max_tokens=40)
        answers[number] = await asyncio.gather(*(engine.generate([number, i], params) for i in range(8)))

    async def main() -> None:
        async with AsyncEngine(core) as engine:
            threads = [threading.Thread(target=lambda n=n: run(clients(engine, n))) for n in range(4)]
            for thread in threads:
                thread.start()
            await clients(engine, 9)
            for thread in threads:
                await asyncio.to_thread(thread.join)

    run(main())
    for number in (0, 1, 2, 3, 9):
        assert [list(one.token_ids) for [one] in answers[number]] == [
            expected_ids([number, i], 40) for i in range(8)
        ]


def test_two_event_loops_with_one_request_id() -> None:
    """One of them is served, the other one is refused."""
    core, runner = big_engine()
    engine = AsyncEngine(core)
    together, refused = threading.Barrier(2), threading.Event()
    results: list[Any] = []
    runner.before_step = lambda: refused.wait(60) and None  # type: ignore[func-returns-value]  # the one that is served has not ended before

    def slowly(frame: Any, event: str, argument: Any) -> Any:
        """Waits at each line, so that both clients are between any two of them at the same time."""
        if frame.f_code.co_filename.endswith(("async_engine.py", "async_request.py", "request_front.py")):
            time.sleep(0.003)
        return slowly

    def client() -> None:
        async def ask() -> None:
            together.wait()
            await engine.generate([1, 2], SamplingParams(max_tokens=4), request_id="x")

        try:
            results.append(run(ask(), 60))
        except Exception as error:
            results.append(error)
            refused.set()

    threads = [threading.Thread(target=client) for _ in range(2)]
    threading.settrace(slowly)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threading.settrace(None)  # type: ignore[arg-type]
    assert [type(one) for one in results if one is not None] == [UsageError], results
    run(engine.close())


def test_a_name_is_free_when_nothing_meant_for_its_request_is_under_way() -> None:
    """The first caller leaves when the engine has already ended its request, and a second one takes the name: what was queued to end
    the first request must not end the second one."""
    core, _ = big_engine()
    engine = AsyncEngine(core)
    call, left = engine._thread.call, threading.Event()

    def slow_call(function: Callable[[Engine], Any]) -> Any:
        if left.is_set() and threading.current_thread() is first:
            time.sleep(0.2)
        return call(function)

    engine._thread.call = slow_call  # type: ignore[method-assign]

    async def leave() -> None:
        stream = engine.stream([1, 2], SamplingParams(max_tokens=20), request_id="x")
        await anext(stream)
        while core.has_unfinished():  # keeps the loop busy: it does not learn of the end
            time.sleep(0.001)
        left.set()
        await stream.aclose()

    async def follow() -> None:
        params = SamplingParams(max_tokens=500)
        while True:
            try:
                [completed] = await engine.generate([3, 4], params, request_id="x")
                break
            except UsageError:  # in use
                await asyncio.sleep(0.002)
        assert list(completed.token_ids) == expected_ids([3, 4], 500)

    first = threading.Thread(target=lambda: run(leave(), 60))
    first.start()
    left.wait(60)
    run(follow(), 60)
    first.join()
    run(engine.close())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_loop_that_was_closed_frees_its_requests() -> None:
    """The tasks of the loop are not cancelled, they just never continue, which asyncio itself reports."""
    core, _ = big_engine()
    engine = AsyncEngine(core)

    async def careless() -> None:
        asyncio.get_running_loop().create_task(engine.generate([1, 2], LONG))
        await until(lambda: bool(core.scheduler.running))

    loop = asyncio.new_event_loop()
    loop.run_until_complete(careless())
    loop.close()
    run(engine.drain(), 30)
    assert not core.has_unfinished() and not engine._requests
    run(engine.close())
    del loop
    gc.collect()


def test_a_tokenizer_that_fails_ends_its_own_request(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(LLAMA)
    decode = type(llm.tokenizer).decode

    def fragile(self: Any, ids: Any, *others: Any) -> str:
        if 7 in ids:
            raise ValueError("invalid prefix")
        return decode(self, ids, *others)

    monkeypatch.setattr(type(llm.tokenizer), "decode", fragile)

    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            bad = engine.generate([1, 2, 3], SamplingParams(max_tokens=9, allowed_token_ids=[7]))
            good = engine.generate(TEXT, SamplingParams(max_tokens=9, bad_words=[[7]]))
            failed, result = await asyncio.gather(bad, good, return_exceptions=True)
            assert (
                isinstance(failed, ValueError) and isinstance(result, list) and len(result[0].token_ids) == 9
            )
            await until(lambda: not llm.engine.has_unfinished())

    run(main())


def test_what_it_is_made_of_is_checked() -> None:
    with pytest.raises(UsageError, match="serves an LLM or an Engine, got str"):
        AsyncEngine("model")  # type: ignore[arg-type]
    core, _ = fake_engine()
    for wrong in ("1", 0, -1.0, 10**400):
        with pytest.raises(UsageError, match="watchdog_seconds must be a positive number"):
            AsyncEngine(core, watchdog_seconds=wrong)
