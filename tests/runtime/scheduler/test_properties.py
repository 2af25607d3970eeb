"""Properties: every request ends, invariants hold, budgets do not change the outputs, dropped plans leave no
trace."""

import itertools
import random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gristmill.runtime.scheduler import (
    FinishReason,
    Pause,
    Request,
    RequestTooLarge,
    Scheduler,
    SchedulerConfig,
)

from .harness import (
    VOCAB,
    FakeModel,
    Run,
    expected_ids,
    launch,
    propose_some,
    run_all,
    snapshot,
    step,
    take,
)

COMMON = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    block_size = draw(st.sampled_from([1, 2, 3, 4, 16]))
    max_seqs = draw(st.integers(1, 6))
    align = draw(st.booleans())
    windows = draw(st.sampled_from([(0,), (0,), (0, 5), (0, 1), (0, 9, 0, 3)]))
    least = max_seqs - 1 + block_size if align else max_seqs
    return SchedulerConfig(
        num_blocks=draw(st.integers(2 * len(windows), 30)),
        block_size=block_size,
        max_batch_tokens=draw(st.integers(least, least + 40)),
        max_seqs=max_seqs,
        max_model_len=draw(st.none() | st.integers(2, 60)),
        max_chunk=draw(st.none() | st.integers(block_size if align else 1, 20)),
        inter_prefill_budget=draw(st.none() | st.integers(0, 20)),
        max_bypass=draw(st.integers(0, 3)),
        watermark=draw(st.sampled_from([0.0, 0.01, 0.3])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        priority_span=draw(st.none() | st.integers(1, 4)),
        prefix_caching=draw(st.booleans()),
        align_chunks=align,
        windows=windows,
    )


def some_request(name: str, rng: random.Random, longest: int) -> dict[str, Any]:
    """Returns a request that often shares a prefix with others."""
    length = rng.randint(1, longest)
    shared = rng.randint(0, length)
    base = [(11 * i + 3) % VOCAB for i in range(shared)]
    return {
        "id": name,
        "prompt_ids": base + [rng.randrange(VOCAB) for _ in range(length - shared)],
        "max_tokens": rng.randint(1, 20),
        "stop_ids": [rng.randrange(VOCAB)],
        "priority": rng.randint(0, 2),
        "cache_key": rng.choice([None, None, "adapter"]),
    }


def ids_alone(request: dict[str, Any], config: SchedulerConfig) -> list[int]:
    return expected_ids(request["prompt_ids"], request["max_tokens"], request["stop_ids"], config.capacity)


@COMMON
@given(configs(), st.integers(0, 2**32), st.integers(1, 12), st.booleans(), st.integers(1, 2))
def test_any_mix_ends_and_its_ids_do_not_depend_on_the_budgets(
    config: SchedulerConfig, seed: int, count: int, drafts: bool, depth: int
) -> None:
    rng = random.Random(seed)
    mix_of_requests = [some_request(str(i), rng, config.capacity - 1) for i in range(count)]
    requests = [Request(**r) for r in mix_of_requests]
    run = run_all(Scheduler(config), requests, drafter=rng if drafts else None, depth=depth)
    for request in mix_of_requests:
        ids = ids_alone(request, config)
        assert run.outputs[request["id"]] == ids
        stopped = ids[-1] in request["stop_ids"]
        assert run.reasons[request["id"]] is (FinishReason.STOP if stopped else FinishReason.LENGTH)


@COMMON
@given(configs(), st.integers(0, 2**32))
def test_a_request_is_refused_exactly_when_it_cannot_fit(config: SchedulerConfig, seed: int) -> None:
    rng = random.Random(seed)
    for length in {1, config.capacity - 1, config.capacity, config.capacity + rng.randint(1, 50)}:
        request = Request("r", [1] * length, 1000)
        scheduler = Scheduler(config)
        try:
            run = run_all(scheduler, [request])
        except RequestTooLarge as error:
            assert length + 1 > config.capacity
            assert f"{length + 1} tokens" in str(error) and f"{config.num_blocks} blocks" in str(error)
            assert not scheduler.has_unfinished()
        else:
            assert len(run.outputs["r"]) == config.capacity - length >= 1


@settings(max_examples=150, deadline=None)
@given(configs(), st.integers(0, 2**32), st.integers(1, 10))
def test_a_dropped_plan_leaves_no_trace(config: SchedulerConfig, seed: int, count: int) -> None:
    """Plans are made and dropped at random, committed ones are discarded: the ids stay equal, and planning
    changes nothing."""
    rng = random.Random(seed)
    mix_of_requests = [some_request(str(i), rng, config.capacity - 1) for i in range(count)]
    scheduler = Scheduler(config)
    for request in mix_of_requests:
        scheduler.add(Request(**request))
    model, run = FakeModel(config), Run()
    while scheduler.has_unfinished():
        propose_some(scheduler, rng)
        before = snapshot(scheduler)
        first, second = scheduler.schedule(), scheduler.schedule()
        assert snapshot(scheduler) == before
        assert (first.entries, first.preempted, first.evicted_blocks, first.bypassed) == (
            second.entries,
            second.preempted,
            second.evicted_blocks,
            second.bypassed,
        )
        if rng.random() < 0.3:
            scheduler.commit(first)
            if rng.random() < 0.5:
                model.run(first)  # it ran, but the results were lost
            scheduler.discard(first)
            scheduler.check()
        step(scheduler, model, run)
    for request in mix_of_requests:
        assert run.outputs[request["id"]] == ids_alone(request, config)


class AnyOrder(RuleBasedStateMachine):
    """Requests are added, held, resumed, aborted and stepped, and the scheduler is paused, in any order, with up to two steps in
    flight."""

    @initialize(config=configs(), seed=st.integers(0, 2**32))
    def begin(self, config: SchedulerConfig, seed: int) -> None:
        self.rng = random.Random(seed)
        self.config = config
        self.scheduler = Scheduler(config)
        self.model = FakeModel(config)
        self.run = Run()
        self.made: dict[str, dict[str, Any]] = {}
        self.aborted: set[str] = set()

    @rule(held=st.booleans())
    def add(self, held: bool) -> None:
        request = some_request(str(len(self.made)), self.rng, self.config.capacity - 1)
        self.scheduler.add(Request(**request), held=held)
        self.made[request["id"]] = request

    @rule()
    def resume(self) -> None:
        for name in list(self.scheduler.held)[:1]:
            self.scheduler.resume(name)

    @rule()
    def hold(self) -> None:
        for request in self.scheduler.waiting[:1]:
            self.scheduler.hold(request.id)

    @rule()
    def abort(self) -> None:
        unfinished = list(self.scheduler.requests)
        if unfinished:
            name = self.rng.choice(unfinished)
            assert [output.id for output in self.scheduler.abort([name])] == [name]
            self.aborted.add(name)

    @rule()
    def launch(self) -> None:
        if len(self.run.in_flight) < 2:
            launch(self.scheduler, self.model, self.run)

    @rule()
    def take(self) -> None:
        if self.run.in_flight:
            take(self.scheduler, self.run)

    @rule()
    def lose(self) -> None:
        """A step that ran is discarded, and the one after it."""
        if self.run.in_flight:
            first = self.rng.randrange(len(self.run.in_flight))
            self.scheduler.discard(self.run.in_flight[first][0])
            del self.run.in_flight[first:]

    def land(self) -> None:
        while self.run.in_flight:
            take(self.scheduler, self.run)

    @rule(pause=st.sampled_from([None, *Pause]))
    def pause(self, pause: Pause | None) -> None:
        self.scheduler.pause(pause)

    @rule()
    def wait_until_nothing_has_started(self) -> None:
        """A pause for new requests: started requests end, and all others stay where they are."""
        self.land()
        self.scheduler.pause(Pause.NEW)
        waiting = [request.id for request in self.scheduler.waiting if not request.started]
        while self.scheduler.has_started():
            step(self.scheduler, self.model, self.run)
        assert [request.id for request in self.scheduler.waiting] == waiting
        assert self.scheduler.pool.num_referenced == 0
        assert step(self.scheduler, self.model, self.run).entries == []

    @rule(steps=st.integers(1, 6))
    def steps(self, steps: int) -> None:
        self.land()
        for _ in range(steps):
            if self.scheduler.paused is not Pause.ALL:  # drafts wait for the next step that runs
                propose_some(self.scheduler, self.rng)
            plan = step(self.scheduler, self.model, self.run)
            assert self.scheduler.paused is not Pause.ALL or plan.entries == []

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.pause(None)
        for name in list(self.scheduler.held):
            self.scheduler.resume(name)
        self.land()
        self._finish()
        for name, request in self.made.items():
            ids = ids_alone(request, self.config)
            actual = self.run.outputs.get(name, [])
            assert actual == (ids[: len(actual)] if name in self.aborted else ids)

    def _finish(self) -> None:
        while self.scheduler.has_unfinished():
            assert self.run.steps < 20_000
            step(self.scheduler, self.model, self.run)
        assert self.scheduler.pool.num_referenced == 0


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)


def test_the_mixes_reach_what_they_are_meant_to_reach() -> None:
    """The properties are not vacuous: preemption, eviction and cache hits do occur in runs like those above."""
    counts = {1: [0] * 5, 2: [0] * 5}
    for depth, seed in itertools.product(counts, range(40)):
        rng = random.Random(seed)
        config = SchedulerConfig(num_blocks=14, block_size=4, max_seqs=4, max_batch_tokens=24)
        requests = [Request(**some_request(str(i), rng, 40)) for i in range(10)]
        run = run_all(Scheduler(config), requests, depth=depth)
        hits = sum(request.cached_tokens for request in requests)
        for place, count in enumerate((run.preemptions, run.evictions, hits, run.ahead, run.fed_back)):
            counts[depth][place] += count
    assert min(counts[1][:3]) > 20 and counts[1][3:] == [0, 0]
    assert min(counts[2]) > 20
