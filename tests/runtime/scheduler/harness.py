"""A fake model for the scheduler's tests that detects every bookkeeping error.

Its "KV" of a position is a number made of the token and of the *stored* number of the previous position,
which it reads through the block table. Its output is a number made of the last stored one. A wrong slot, a
block that is shared too early, evicted while in use or matched for another prefix, and a position that is
never computed all change the output ids. A group with a window stores the same numbers, and each token checks all that its window
reads. A token that a step in flight has sampled is read from the row of its request,
and is gone when it was read.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gristmill.runtime.scheduler import (
    FinishReason,
    Request,
    ScheduledRequest,
    ScheduledStep,
    Scheduler,
    SchedulerConfig,
)

MASK = (1 << 61) - 1
VOCAB = 50
SlotFunction = Callable[[ScheduledRequest, int], list[int]]


def mix(state: int, token: int) -> int:
    """Returns the KV of a token that follows `state`."""
    return ((state ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & MASK


def expected_ids(
    prompt: Sequence[int], max_tokens: int, stop_ids: Sequence[int] = (), capacity: int = 1 << 60
) -> list[int]:
    """Returns the ids of the fake model when it runs a single request."""
    state = 0
    for token in prompt:
        state = mix(state, token)
    output: list[int] = []
    while len(output) < max_tokens and len(prompt) + len(output) < capacity:
        output.append(state % VOCAB)
        if output[-1] in stop_ids:
            break
        state = mix(state, output[-1])
    return output


@dataclass
class FakeModel:
    """Runs committed plans. Raises AssertionError where a plan breaks its contract."""

    config: SchedulerConfig
    slots_of: SlotFunction = ScheduledRequest.slots
    kv: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)  # row -> the token sampled last, until it is read

    def run(self, plan: ScheduledStep) -> list[int | list[int]]:
        """Returns the sampled ids, one result per entry that samples; drafts are verified greedily."""
        config, groups = self.config, len(self.config.windows)
        assert plan.num_tokens == sum(entry.count for entry in plan.entries) <= config.max_batch_tokens
        assert len(plan.entries) <= config.max_seqs
        assert len({entry.id for entry in plan.entries}) == len(plan.entries)
        assert len({entry.row for entry in plan.entries}) == len(plan.entries)
        assert all(0 <= entry.row < config.max_seqs for entry in plan.entries)
        written: set[int] = set()
        results: list[int | list[int]] = []
        for entry in plan.entries:
            tokens = [self.last.pop(entry.row)] if entry.tokens is None else entry.tokens
            assert entry.count == len(tokens) >= 1
            slots = (
                self.slots_of(entry, config.block_size)
                if groups == 1
                else entry.slots(config.block_size, 0, groups)
            )
            others = [entry.slots(config.block_size, group, groups) for group in range(1, groups)]
            of_groups = {slot for group in (slots, *others) for slot in group}
            assert len(of_groups) == groups * entry.count and not written & of_groups, "two tokens in a slot"
            assert max(of_groups) < config.num_blocks * config.block_size, "the null block is written"
            written |= of_groups
            states = []
            for offset, (token, slot) in enumerate(zip(tokens, slots, strict=True)):
                state = mix(self._before(entry, entry.start + offset), token)
                self.kv[slot] = state
                for group, of_tokens in enumerate(others, 1):
                    self._check_window(entry, entry.start + offset, group)
                    self.kv[of_tokens[offset]] = state
                states.append(state)
            if entry.samples:
                result = self._sample(entry, states)
                self.last[entry.row] = result if isinstance(result, int) else result[-1]
                results.append(result)
        return results

    def _before(self, entry: ScheduledRequest, position: int) -> int:
        if position == 0:
            return 0
        return self.kv[self._slot(entry, position - 1, 0)]

    def _slot(self, entry: ScheduledRequest, position: int, group: int) -> int:
        size, groups = self.config.block_size, len(self.config.windows)
        return entry.block_ids[position // size * groups + group] * size + position % size

    def _check_window(self, entry: ScheduledRequest, position: int, group: int) -> None:
        window = self.config.windows[group]
        for before in range(max(0, position - window + 1) if window else 0, position):
            right = self.kv[self._slot(entry, before, 0)]
            assert self.kv.get(self._slot(entry, before, group)) == right, (
                f"group {group}, position {position} reads another token than {before}"
            )

    def _sample(self, entry: ScheduledRequest, states: list[int]) -> int | list[int]:
        if not entry.drafts:
            return states[-1] % VOCAB
        assert entry.tokens is not None
        accepted = []
        first = entry.count - entry.drafts
        for index in range(first, entry.count):
            accepted.append(states[index - 1] % VOCAB)
            if accepted[-1] != entry.tokens[index]:
                return accepted
        return [*accepted, states[-1] % VOCAB]


@dataclass
class Run:
    """The results of a run."""

    outputs: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, FinishReason] = field(default_factory=dict)
    steps: int = 0
    preemptions: int = 0
    evictions: int = 0
    ahead: int = 0  # steps that were planned while another was in flight
    fed_back: int = 0  # tokens that were on the device only when their step was planned
    in_flight: list[tuple[ScheduledStep, list[int | list[int]]]] = field(default_factory=list)


def step(scheduler: Scheduler, model: FakeModel, run: Run) -> ScheduledStep:
    """Runs one checked step."""
    plan = launch(scheduler, model, run)
    take(scheduler, run)
    assert not any(request.drafts for request in scheduler.requests.values()), "drafts outlived their step"
    return plan


def snapshot_of_request(request: Request) -> tuple[object, ...]:
    """The mutable state of a request as values."""
    return (
        request.id,
        request.state.value,
        request.arrival,
        tuple(request.tokens),
        request.computed,
        request.pending,
        request.row,
        tuple(request.block_ids),
        tuple(request.drafts),
        request.bypassed,
        request.started,
        request.preemptions,
        request.cached_tokens,
        tuple(request.block_hashes),
        request.registered,
        id(request.last_cached),
        request.finish_reason,
    )


def snapshot(scheduler: Scheduler) -> tuple[object, ...]:
    """The whole state as values; equal snapshots mean equal states."""
    pool, cache = scheduler.pool, scheduler.cache
    return (
        scheduler._version,
        scheduler._arrivals,
        scheduler.queued_tokens,
        scheduler.paused,
        tuple(id(plan) for plan in scheduler.in_flight),
        tuple(scheduler.free_rows),
        tuple(pool.refs),
        tuple(pool.queue()),
        tuple(id(content) for content in pool.content),
        pool.num_available,
        pool.num_cached,
        None if cache is None else sorted((hash_, *entry.blocks) for hash_, entry in cache._table.items()),
        tuple(request.id for request in scheduler.running),
        tuple(request.id for request in scheduler.waiting),
        tuple(scheduler.held),
        tuple(snapshot_of_request(request) for request in scheduler.requests.values()),
    )


def launch(scheduler: Scheduler, model: FakeModel, run: Run) -> ScheduledStep:
    """Plans and runs a step, whose results stay in flight; an empty one is not committed while another is in flight."""
    before = snapshot(scheduler)
    plan = scheduler.schedule()
    assert snapshot(scheduler) == before
    for entry in plan.entries:
        assert entry.context < scheduler.requests[entry.id].limit, "a step after the last token"
    if run.in_flight and not plan.entries:
        return plan
    scheduler.commit(plan)
    scheduler.check()
    run.in_flight.append((plan, model.run(plan)))
    run.steps += 1
    run.preemptions += len(plan.preempted)
    run.evictions += len(plan.evicted_blocks)
    run.ahead += len(run.in_flight) == 2
    run.fed_back += sum(entry.tokens is None for entry in plan.entries)
    return plan


def take(scheduler: Scheduler, run: Run) -> None:
    """Takes the results of the oldest step in flight."""
    plan, results = run.in_flight.pop(0)
    for output in scheduler.update(plan, results):
        assert output.id not in run.reasons, "a request that has ended came again"
        run.outputs.setdefault(output.id, []).extend(output.new_ids)
        if output.finish_reason is not None:
            run.reasons[output.id] = output.finish_reason
    scheduler.check()


def run_all(
    scheduler: Scheduler,
    requests: Sequence[Request],
    model: FakeModel | None = None,
    limit: int = 20_000,
    drafter: random.Random | None = None,
    depth: int = 1,
) -> Run:
    """Adds all requests and runs to the end, checking every invariant at every step. depth: of steps in flight."""
    model = model or FakeModel(scheduler.config)
    run = Run()
    for request in requests:
        scheduler.add(request)
    while scheduler.has_unfinished():
        assert run.steps < limit, "no end in sight\n" + scheduler.dump()
        if drafter is not None and not run.in_flight:
            propose_some(scheduler, drafter)
        while len(run.in_flight) < depth and launch(scheduler, model, run).entries:
            pass
        take(scheduler, run)
    for plan, _ in run.in_flight[:1]:
        assert not scheduler.serves(plan)
        scheduler.discard(plan)
    scheduler.check()
    assert scheduler.pool.num_referenced == 0
    return run


def propose_some(scheduler: Scheduler, rng: random.Random) -> None:
    """Proposes drafts for random decoding requests, some of them correct."""
    for request in scheduler.running:
        if len(request.tokens) - request.computed == 1 and rng.random() < 0.5:
            right = expected_ids(request.tokens, rng.randint(1, 5))
            if rng.random() < 0.5:
                right[rng.randrange(len(right))] += 1
            scheduler.propose(request.id, right)
