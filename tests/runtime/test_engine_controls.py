"""Pause, resume, drain, queue limits and priorities of the engine, and any interleaving of its operations."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from gristmill.runtime.engine import Engine, EngineDraining
from gristmill.runtime.errors import UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import FinishReason, QueueFull, RequestOutput
from tests.runtime.fake_runner import fake_engine
from tests.runtime.oracle import LLAMA
from tests.runtime.scheduler.harness import VOCAB, expected_ids

TEXT = "The CREATE INDEX statement"
PARAMS = SamplingParams(max_tokens=6)


def finish(engine: Engine) -> dict[str, str]:
    """Steps to the end; returns id -> finish reason."""
    ended = {}
    while engine.has_unfinished():
        for output in engine.step():
            if output.finish_reason is not None:
                ended[output.id] = output.finish_reason.value
    return ended


def test_wait_lets_what_has_begun_end_and_nothing_else() -> None:
    engine, _ = fake_engine(max_seqs=2)
    for name in "abc":
        engine.add_request(name, [1, 2, 3], PARAMS)
    engine.step()
    engine.pause("wait")
    engine.add_request("d", [1, 2, 3], PARAMS)
    ended = []
    while not engine.paused:
        ended += [output.id for output in engine.step() if output.finish_reason]
    assert ended == ["a", "b"] and engine.step() == []
    engine.resume()
    assert not engine.paused and finish(engine) == {"c": "length", "d": "length"}


def test_keep_goes_on_with_the_same_ids() -> None:
    engine, runner = fake_engine(async_steps=False)
    engine.add_request("a", [1, 2, 3], PARAMS)
    actual = [token for output in engine.step() for token in output.new_ids]
    engine.pause("keep")
    assert engine.paused and engine.step() == [] and runner.steps == 1 and engine.has_unfinished()
    engine.resume()
    while engine.has_unfinished():
        actual += [token for output in engine.step() for token in output.new_ids]
    assert actual == expected_ids([1, 2, 3], 6)


def test_abort_ends_all_with_outputs() -> None:
    engine, _ = fake_engine(max_seqs=1)
    for name in "ab":
        engine.add_request(name, [1, 2, 3], PARAMS)
    engine.step()
    engine.pause("abort")
    assert not engine.paused
    assert [(o.id, o.finish_reason) for o in engine.step()] == [
        ("a", FinishReason.ABORT),
        ("b", FinishReason.ABORT),
    ]
    assert engine.paused and not engine.has_unfinished()
    engine.add_request("c", [1], PARAMS)
    assert engine.step() == []
    engine.resume()
    assert finish(engine) == {"c": "length"}


def test_drain_refuses_new_ones_and_ends_the_rest_at_its_deadline() -> None:
    engine, _ = fake_engine(max_seqs=1)
    now = 100.0
    engine._clock = lambda: now
    engine.add_request("a", [1, 2], SamplingParams(max_tokens=2))
    engine.add_request("b", [1, 2], SamplingParams(max_tokens=50))
    engine.drain(5.0)
    assert engine.draining
    with pytest.raises(EngineDraining, match="'c' refused: the engine is draining"):
        engine.add_request("c", [1], PARAMS)
    outputs: list[RequestOutput] = []
    for _ in range(10):
        outputs += engine.step()
    now = 105.0
    last = engine.step()
    assert [(o.id, o.finish_reason) for o in last] == [("b", FinishReason.ABORT)]
    assert [o.id for o in outputs if o.finish_reason] == ["a"] and not engine.has_unfinished()
    assert engine.step() == []


def test_a_second_drain_ends_at_once_and_a_pause_ends_with_a_drain() -> None:
    engine, _ = fake_engine()
    engine.add_request("a", [1, 2], SamplingParams(max_tokens=50))
    engine.pause("keep")
    engine.drain()
    assert not engine.paused and engine.step()[0].new_ids
    engine.drain(0)
    assert [o.finish_reason for o in engine.step()] == [FinishReason.ABORT]
    assert not engine.has_unfinished()


def test_a_drain_takes_no_abort_back() -> None:
    engine, _ = fake_engine()
    engine.add_request("a", [1, 2], SamplingParams(max_tokens=50))
    engine.pause("abort")
    engine.drain()
    assert [o.finish_reason for o in engine.step()] == [FinishReason.ABORT]


def test_an_abort_of_nothing_ends_nothing_that_comes_later() -> None:
    engine, _ = fake_engine()
    engine.pause("abort")
    assert engine.paused
    engine.add_request("a", [1, 2], PARAMS)
    engine.resume()
    assert finish(engine) == {"a": "length"}


def test_wrong_wishes() -> None:
    engine, _ = fake_engine()
    with pytest.raises(UsageError, match="unknown mode 'stop', expected one of abort, wait, keep"):
        engine.pause("stop")  # type: ignore[arg-type]
    for wrong in (-1, float("nan"), True):
        with pytest.raises(UsageError, match="timeout must be seconds"):
            engine.drain(wrong)


def test_the_options_of_llm_reach_the_scheduler(make: Callable[..., LLM]) -> None:
    options = {
        "priority_span": 7,
        "max_queued": 2,
        "max_queued_tokens": 90,
        "max_bypass": 3,
        "inter_prefill_budget": 11,
    }
    llm = make(LLAMA, queue_order="priority", max_seqs=1, **options)
    config = llm.engine.scheduler.config
    assert config.policy == "priority" and {name: getattr(config, name) for name in options} == options
    with pytest.raises(QueueFull, match="2 requests are waiting, which is max_queued"):
        llm.generate(["a", "b", "c"], PARAMS)
    with pytest.raises(QueueFull, match=r"max_queued_tokens \(90\)"):
        llm.generate([[1] * 60, [1] * 60], PARAMS)
    assert not llm.engine.has_unfinished()
    order = [c.index for c in llm.stream(["a", "b"], PARAMS, priority=[1, 0]) if c.finish_reason]
    assert order == [1, 0]
    for wrong in ([1], "high"):
        with pytest.raises(UsageError, match="priority must be an integer, or one for each of 2 prompts"):
            llm.generate(["a", "b"], PARAMS, priority=wrong)  # type: ignore[arg-type]
    for name, value in (("queue_order", "lifo"), ("max_queued_tokens", -1), ("priority_span", 0)):
        with pytest.raises(UsageError, match=name):
            make(LLAMA, **{name: value})


def test_llm_paused_between_chunks(make: Callable[..., LLM]) -> None:
    llm = make(LLAMA)
    expected = llm.generate(TEXT, PARAMS)[0].token_ids
    stream = llm.stream(TEXT, PARAMS)
    first = next(stream)
    llm.pause("keep")
    llm.resume()
    assert (*first.token_ids, *(t for chunk in stream for t in chunk.token_ids)) == expected
    llm.pause("keep")
    with pytest.raises(UsageError, match="the engine is paused: call resume"):
        llm.generate("x", PARAMS)
    llm.resume()
    assert llm.generate(TEXT, PARAMS)[0].token_ids == expected


def test_a_signal_drains_a_running_generate(make: Callable[..., LLM]) -> None:
    """`generate` returns what exists at the deadline."""
    llm = make(LLAMA)
    old = signal.signal(signal.SIGALRM, lambda *_: llm.drain(0))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        results = llm.generate([TEXT, "x"], SamplingParams(max_tokens=3000, ignore_eos=True))
    finally:
        signal.signal(signal.SIGALRM, old)
    assert [r.finish_reason for r in results] == ["abort", "abort"] and results[0].token_ids
    with pytest.raises(EngineDraining):
        llm.generate("x")


class AnyOrder(RuleBasedStateMachine):
    """Requests are added, follow others, are stepped, fail, are aborted, paused, resumed and drained in any
    order."""

    @initialize(
        seed=st.integers(0, 2**32),
        blocks=st.integers(8, 20),
        span=st.none() | st.integers(1, 3),
        async_steps=st.booleans(),
    )
    def begin(self, seed: int, blocks: int, span: int | None, async_steps: bool) -> None:
        self.rng = random.Random(seed)
        self.engine, self.runner = fake_engine(
            async_steps,
            num_blocks=blocks,
            max_seqs=3,
            max_batch_tokens=24,
            policy="priority",
            priority_span=span,
        )
        self.now = 0.0
        self.engine._clock = lambda: self.now
        self.prompts: dict[str, list[int]] = {}
        self.got: dict[str, list[int]] = {}
        self.stops: dict[str, Sequence[int]] = {}
        self.ended: dict[str, FinishReason] = {}

    def take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert output.id not in self.ended, "a request that has ended came again"
            self.got[output.id] += output.new_ids
            if output.finish_reason is not None:
                self.ended[output.id] = output.finish_reason

    def add_one(self, after: str | None = None) -> None:
        name = str(len(self.prompts))
        prompt = [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(1, 18))]
        if after is not None:
            prompt = self.prompts[after]
        params = SamplingParams(max_tokens=8, stop_token_ids=[self.rng.randrange(VOCAB) for _ in range(4)])
        try:
            self.engine.add_request(name, prompt, params, priority=self.rng.randint(0, 2), after=after)
        except EngineDraining:
            assert self.engine.draining
            return
        self.prompts[name], self.got[name], self.stops[name] = prompt, [], params.stop_token_ids

    @rule(followers=st.integers(0, 2))
    def add(self, followers: int) -> None:
        before = len(self.prompts)
        self.add_one()
        for _ in range(followers if len(self.prompts) > before else 0):
            self.add_one(after=str(before))

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            paused = self.engine.paused
            outputs = self.engine.step()
            assert not (paused and outputs)
            self.take(outputs)

    @rule(at_launch=st.booleans())
    def failing_step(self, at_launch: bool) -> None:
        def fail() -> None:
            raise ZeroDivisionError

        name = "before_step" if at_launch else "before_collect"
        setattr(self.runner, name, fail)
        with suppress(ZeroDivisionError):
            self.take(self.engine.step())
        setattr(self.runner, name, lambda: None)

    @rule(count=st.integers(1, 3))
    def abort(self, count: int) -> None:
        open_ids = [name for name in self.prompts if name not in self.ended]
        chosen = self.rng.sample(open_ids, min(count, len(open_ids)))
        outputs = self.engine.abort([*chosen, "nobody"])
        assert [output.id for output in outputs] == chosen
        self.take(outputs)

    @rule(mode=st.sampled_from(["abort", "wait", "keep"]))
    def pause(self, mode: str) -> None:
        self.engine.pause(mode)  # type: ignore[arg-type]

    @rule()
    def resume(self) -> None:
        self.engine.resume()

    @rule(timeout=st.none() | st.integers(0, 20))
    def drain(self, timeout: int | None) -> None:
        if self.rng.random() < 0.3:
            self.engine.drain(timeout)

    @rule(seconds=st.integers(1, 10))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.resume()
        for _ in range(5_000):
            if not self.engine.has_unfinished():
                break
            self.take(self.engine.step())
        assert self.ended.keys() == self.prompts.keys(), "a request has not ended"
        assert self.engine.scheduler.pool.num_referenced == 0
        assert not self.engine._active and not self.engine._followers
        assert not self.engine._pipeline.in_flight and not self.engine.scheduler.in_flight
        for name, prompt in self.prompts.items():
            capacity = self.engine.scheduler.config.capacity
            ids = expected_ids(prompt, 8, self.stops[name], capacity)
            assert self.got[name] == ids[: len(self.got[name])]
            assert self.ended[name] is FinishReason.ABORT or self.got[name] == ids


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)


def test_a_planted_fault_shows() -> None:
    """Planted fault: requests that follow an aborted one are forgotten."""

    class Forgetful(AnyOrder):
        @initialize(seed=st.integers(0, 2**32))
        def begin(self, seed: int) -> None:  # type: ignore[override]
            super().begin(seed, 8, None, False)
            self.engine._release_followers = lambda request_id: None  # type: ignore[method-assign]

    with pytest.raises((AssertionError, ExceptionGroup)):
        quick = settings(AnyOrder.TestCase.settings, database=None, phases=[Phase.generate])
        run_state_machine_as_test(Forgetful, settings=quick)
