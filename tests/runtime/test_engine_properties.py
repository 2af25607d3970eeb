"""A long life of an asynchronous engine: several KV groups, drafts, pauses, aborts, preemption, followers, steps that fail, and two event loops.
Each request ends exactly once, with the ids of the fake model; every block returns; and nothing grows."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import aclosing, suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.runtime.async_engine import AsyncEngine
from gristmill.runtime.engine import Engine
from gristmill.runtime.engine_thread import EngineDeadError
from gristmill.runtime.errors import UsageError
from gristmill.runtime.kv_cache import PoolError
from gristmill.runtime.kv_cache.block_pool import BlockPool
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import FinishReason, RequestOutput, Scheduler
from gristmill.runtime.speculation import DraftRequest
from gristmill.runtime.speculation.config import Speculation
from gristmill.runtime.step_pipeline import StepPipeline
from tests.runtime.draft_sources import Source, use
from tests.runtime.fake_runner import fake_engine
from tests.runtime.scheduler.harness import VOCAB, expected_ids
from tests.runtime.serving import until

MOST_OPEN = 12
GROWTH = 3_000
"""Objects of Python that may be more after many steps than after a few: what is open differs."""


class PlantedFailure(Exception):
    """A step of the fake runner, or its proposer."""


class Forgetful(Source):
    """A proposer that keeps nothing of requests."""

    def ended(self, request_id: str, tokens: object, prompt_len: int) -> None:
        pass


class Life:
    """An engine with random limits and the requests that it has."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        windows = rng.choice(((0,), (0, 8), (0, 5, 12)))
        self.engine, self.runner = fake_engine(
            True,
            rng.choice((None, Speculation("ngram", rng.randint(1, 5), adaptive=rng.random() < 0.7))),
            num_blocks=len(windows) * rng.choice((9, 12, 32)),
            max_seqs=rng.randint(1, 8),
            max_batch_tokens=rng.randint(8, 40),
            max_chunk=rng.choice((None, 3)),
            prefix_caching=rng.random() < 0.7,
            policy=rng.choice(("fcfs", "priority")),
            windows=windows,
        )
        self.open: dict[str, tuple[list[int], SamplingParams]] = {}
        self.ids: dict[str, list[int]] = {}
        self.seen: Counter[str] = Counter()
        self.numbers = 0
        self.failing = True
        for hook in ("before_step", "before_complete", "before_collect"):
            setattr(self.runner, hook, self._sometimes_fail)
        if self.engine.speculator is not None:
            use(self.engine, Forgetful({}, self._draft))
        commit = self.engine.scheduler.commit
        self.engine.scheduler.commit = lambda step: (self._count(step), commit(step))[1]  # type: ignore[method-assign]

    def _count(self, step: Any) -> None:
        self.seen["preempted"] += len(step.preempted)
        self.seen["drafts"] += step.has_drafts
        ahead = any(entry.tokens is None for entry in step.entries)
        self.seen["ahead"] += ahead
        self.seen["ahead beside drafts"] += ahead and self.engine.speculator is not None

    def _sometimes_fail(self) -> None:
        if self.failing and self.rng.random() < 0.01:
            self.seen["failures"] += 1
            raise PlantedFailure

    def _draft(self, _: list[int], count: int, request: DraftRequest) -> list[int]:
        drafts = expected_ids(request.tokens, self.rng.randint(0, count + 1))
        if drafts and self.rng.random() < 0.4:
            drafts[self.rng.randrange(len(drafts))] = self.rng.randrange(-1, VOCAB + 1)
        return drafts

    def arrive(self) -> None:
        """Add a request, which may follow another one, or take the id of one that has ended."""
        rng = self.rng
        self.numbers += 1
        name = f"r{self.numbers % (4 * MOST_OPEN)}"
        if name in self.open:
            return
        leader = rng.choice([*self.open]) if self.open and rng.random() < 0.15 else None
        if leader is None:
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 22))]
        else:
            prompt = self.open[leader][0]
        params = SamplingParams(max_tokens=rng.randint(1, 14), stop_token_ids=rng.sample(range(VOCAB), 2))
        self.open[name], self.ids[name] = (prompt, params), []
        self.engine.add_request(name, prompt, params, priority=rng.randrange(3), after=leader)

    def take(self, outputs: Iterable[RequestOutput]) -> None:
        """Outputs of the engine, of requests that have not ended."""
        for output in outputs:
            assert output.id in self.open, "a request ended twice, or went on after its end"
            self.ids[output.id] += output.new_ids
            if output.finish_reason is None:
                continue
            (prompt, params), ids = self.open.pop(output.id), self.ids.pop(output.id)
            whole = expected_ids(
                prompt, params.max_tokens, params.stop_token_ids, self.engine.scheduler.config.capacity
            )
            aborted = output.finish_reason is FinishReason.ABORT
            assert ids == (whole[: len(ids)] if aborted else whole), output
            self.seen[output.finish_reason.value] += 1

    def act(self) -> None:
        """One thing that may happen to an engine; most often a step."""
        rng, engine = self.rng, self.engine
        action = rng.random()
        if action < 0.15 and len(self.open) < MOST_OPEN:
            self.arrive()
        elif action < 0.17:
            self.take(engine.abort([f"r{rng.randrange(4 * MOST_OPEN)}" for _ in range(2)]))
        elif action < 0.18:
            engine.pause(rng.choice(("wait", "keep", "abort")))
            self.seen["pauses"] += 1
        elif action < 0.22:
            engine.resume()
        elif not engine.paused:
            try:
                self.take(engine.step())
            except PlantedFailure:
                engine.scheduler.check()

    def live(self, steps: int) -> None:
        """Go on for this many steps."""
        end = self.runner.steps + steps
        while self.runner.steps < end:
            self.act()
            if not self.open:
                self.arrive()

    def end(self) -> None:
        """Run to the end: nothing is left of any request."""
        engine, self.failing = self.engine, False
        engine.resume()
        while engine.has_unfinished():
            self.take(engine.step())
        engine.scheduler.check()
        assert not self.open, "a request has not ended"
        assert engine.scheduler.pool.num_referenced == 0, "a block did not return"
        assert not engine._active and not engine._followers and not engine.runner.processors
        assert (
            not engine._pipeline.in_flight
            and len(engine.scheduler.free_rows) == engine.scheduler.config.max_seqs
        )


def objects() -> int:
    gc.collect()
    return sys.getallocatedblocks()


def lives(seed: int, steps: int) -> Counter[str]:
    """A life of so many steps in all, in constant memory; returns what happened in it."""
    life = Life(seed)
    life.live(steps // 5)
    life.end()
    before = objects()
    for _ in range(4):
        life.failing = True
        life.live(steps // 5)
        life.end()
    assert objects() - before < GROWTH, "what an engine keeps grows with its steps"
    return life.seen


@settings(max_examples=16, deadline=None)
@given(st.integers(0, 1 << 32))
def test_any_life(seed: int) -> None:
    lives(seed, 500)


def test_what_happens_in_lives() -> None:
    seen = sum((lives(seed, 400) for seed in range(5)), Counter[str]())
    happened = (
        "preempted",
        "drafts",
        "ahead",
        "ahead beside drafts",
        "failures",
        "pauses",
        "abort",
        "stop",
        "length",
    )
    assert all(seen[name] > 5 for name in happened), seen


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 32))
def test_a_million_steps(seed: int) -> None:
    lives(seed, 25_000)


class Clients:
    """Coroutines in two event loops, each in a thread, that one engine serves; with `failing`, until a step fails."""

    def __init__(self, seed: int, failing: bool, each: int) -> None:
        rng = random.Random(seed)
        self.core, self.runner = fake_engine(
            True, num_blocks=rng.choice((10, 14, 40)), max_seqs=rng.randint(2, 6), windows=(0,)
        )
        self.engine = AsyncEngine(self.core)
        self.seen: Counter[str] = Counter()
        self.each = each
        last = rng.randint(20, 200) if failing else -1

        def fail() -> None:
            if self.runner.steps == last:
                raise PlantedFailure

        self.runner.before_step = fail
        self.errors: list[BaseException] = []

    def live(self) -> Counter[str]:
        """All clients to their ends; returns how their requests ended."""
        threads = [threading.Thread(target=self._loop, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a request does not end"
        if self.errors:
            raise self.errors[0]
        if self.engine.error is None:
            asyncio.run(self._closed())
            self.core.scheduler.check()
            assert self.core.scheduler.pool.num_referenced == 0, "a block did not return"
            assert not self.core.has_unfinished() and not self.core._active
        assert not self.engine._requests
        return self.seen

    async def _closed(self) -> None:
        await until(
            lambda: not self.core.has_unfinished()
        )  # those that were left are aborted by the next step
        await self.engine.close()

    def _loop(self, number: int) -> None:
        async def main() -> None:
            await asyncio.gather(*(self._client(random.Random(f"{number} {i}")) for i in range(5)))

        try:
            asyncio.run(main())
        except BaseException as error:
            self.errors.append(error)

    async def _client(self, rng: random.Random) -> None:
        for _ in range(self.each):
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 20))]
            params = SamplingParams(max_tokens=rng.randint(1, 14), stop_token_ids=[rng.randrange(VOCAB)])
            name = f"x{rng.randrange(3)}" if rng.random() < 0.2 else None
            leaves = rng.randint(1, 3) if rng.random() < 0.2 else 0
            if rng.random() < 0.1:
                await self._abort(f"x{rng.randrange(3)}")
            try:
                await self._request(prompt, params, name, leaves)
            except EngineDeadError:
                self.seen["dead"] += 1
                return
            except UsageError:
                assert name is not None, "the name of another request"
                self.seen["refused"] += 1

    async def _abort(self, name: str) -> None:
        with suppress(EngineDeadError):
            await self.engine.abort(name)

    async def _request(
        self, prompt: list[int], params: SamplingParams, name: str | None, leaves: int
    ) -> None:
        ids: list[int] = []
        ends: list[str] = []
        async with aclosing(self.engine.stream(prompt, params, request_id=name)) as stream:
            async for chunk in stream:
                assert not ends, "a request went on after its end"
                ids += chunk.token_ids
                ends += [] if chunk.finish_reason is None else [chunk.finish_reason]
                leaves -= 1
                if leaves == 0 and not ends:
                    self.seen["left"] += 1
                    return
        assert len(ends) == 1, "a request did not end once"
        whole = expected_ids(prompt, params.max_tokens, params.stop_token_ids)
        assert ids == (whole[: len(ids)] if ends == ["abort"] else whole)
        self.seen[ends[0]] += 1


def test_two_event_loops() -> None:
    ends = ("length", "stop", "abort", "left", "dead", "refused")
    seen: Counter[str] = Counter()
    steps = seed = 0
    # How often clients leave or abort depends on the threads' timing: more seeds follow until each end was seen.
    while steps < 2000 or (seed < 60 and not all(seen[end] > 3 for end in ends)):
        clients = Clients(seed, failing=seed % 3 == 2, each=20)
        seen += clients.live()
        steps, seed = steps + clients.runner.steps, seed + 1
    assert all(seen[end] > 3 for end in ends), seen


@pytest.mark.slow
def test_two_event_loops_for_long() -> None:
    before, steps = 0, 0
    for seed in range(40):
        clients = Clients(seed, failing=seed % 4 == 3, each=400)
        clients.live()
        steps += clients.runner.steps
        del clients
        before = before or objects()
    assert steps > 20_000 and objects() - before < GROWTH, "what engines keep grows with their steps"


def lose_a_block(patch: pytest.MonkeyPatch) -> None:
    """Every 40th time, the first of the blocks does not return."""
    release, calls = BlockPool.release, iter(range(1 << 30))

    def careless(self: BlockPool, blocks: Any) -> None:
        blocks = list(blocks)
        release(self, blocks[1:] if next(calls) % 40 == 39 else blocks)

    patch.setattr(BlockPool, "release", careless)


def end_twice(patch: pytest.MonkeyPatch) -> None:
    """The last output of a request is returned again with the next step's."""
    step, last = Engine.step, list[RequestOutput]()

    def repeating(self: Engine) -> list[RequestOutput]:
        outputs = step(self)
        again, last[:] = [*last], [one for one in outputs if one.finish_reason is not None]
        return [*again, *outputs]

    patch.setattr(Engine, "step", repeating)


def forget_to_complete(patch: pytest.MonkeyPatch) -> None:
    """The rest of a step that was launched ahead is not launched."""
    complete, calls = StepPipeline._complete, iter(range(1 << 30))

    def careless(self: StepPipeline) -> None:
        if next(calls) % 50 != 49:
            complete(self)

    patch.setattr(StepPipeline, "_complete", careless)


def keep_what_is_discarded(patch: pytest.MonkeyPatch) -> None:
    """A step that failed counts as computed."""
    patch.setattr(Scheduler, "discard", lambda self, step: self.in_flight.clear())


def keep_outputs(patch: pytest.MonkeyPatch) -> None:
    """The engine remembers every output."""
    step, kept = Engine.step, list[Any]()

    def hoarding(self: Engine) -> list[RequestOutput]:
        outputs = step(self)
        kept.append([*outputs])
        return outputs

    patch.setattr(Engine, "step", hoarding)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lose_a_block, "owners, references. that differ"),
        (end_twice, "ended twice"),
        (forget_to_complete, "launched into a step|whose rest was not launched"),
        (keep_what_is_discarded, "tokens are said to be pending, steps in flight sample"),
        (keep_outputs, "grows with its steps"),
    ],
)
def test_planted_faults_show(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None], message: str
) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, PoolError, ValueError, KeyError), match=message):
        for seed in range(4):
            lives(seed, 4000 if fault is keep_outputs else 500)
