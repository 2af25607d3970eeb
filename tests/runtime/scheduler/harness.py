"""A fake model for the scheduler's tests that detects every bookkeeping error.

Its "KV" of a position is a number made of the token and of the *stored* number of the previous position,
which it reads through the block table. Its output is a number made of the last stored one. A wrong slot, a
block that is shared too early, evicted while in use or matched for another prefix, and a position that is
never computed all change the output ids.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gristmill.runtime.scheduler import (
    FinishReason,
    Request,
    ScheduledRequest,
    Scheduler,
    SchedulerConfig,
    StepPlan,
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

    def run(self, plan: StepPlan) -> list[int | list[int]]:
        """Returns the sampled ids, one result per entry that samples; drafts are verified greedily."""
        config = self.config
        assert plan.num_tokens == sum(entry.count for entry in plan.entries) <= config.max_batch_tokens
        assert len(plan.entries) <= config.max_seqs
        assert len({entry.id for entry in plan.entries}) == len(plan.entries)
        written: set[int] = set()
        results: list[int | list[int]] = []
        for entry in plan.entries:
            assert entry.count == len(entry.tokens) >= 1
            slots = self.slots_of(entry, config.block_size)
            assert not written & set(slots), "two tokens of a step are written to one slot"
            written |= set(slots)
            states = []
            for offset, (token, slot) in enumerate(zip(entry.tokens, slots, strict=True)):
                state = mix(self._before(entry, entry.start + offset), token)
                self.kv[slot] = state
                states.append(state)
            if entry.samples:
                results.append(self._sample(entry, states))
        return results

    def _before(self, entry: ScheduledRequest, position: int) -> int:
        if position == 0:
            return 0
        block = entry.block_ids[(position - 1) // self.config.block_size]
        return self.kv[block * self.config.block_size + (position - 1) % self.config.block_size]

    def _sample(self, entry: ScheduledRequest, states: list[int]) -> int | list[int]:
        if not entry.drafts:
            return states[-1] % VOCAB
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


def step(scheduler: Scheduler, model: FakeModel, run: Run) -> StepPlan:
    """Runs one checked step."""
    plan = scheduler.plan()
    scheduler.commit(plan)
    scheduler.check()
    for output in scheduler.update(plan, model.run(plan)):
        run.outputs.setdefault(output.id, []).extend(output.new_ids)
        if output.finish_reason is not None:
            run.reasons[output.id] = output.finish_reason
    scheduler.check()
    assert not any(request.drafts for request in scheduler.requests.values()), "drafts outlived their step"
    run.steps += 1
    run.preemptions += len(plan.preempted)
    run.evictions += len(plan.evicted_blocks)
    return plan


def run_all(
    scheduler: Scheduler,
    requests: Sequence[Request],
    model: FakeModel | None = None,
    limit: int = 20_000,
    drafter: random.Random | None = None,
) -> Run:
    """Adds all requests and runs to the end, checking every invariant at every step."""
    model = model or FakeModel(scheduler.config)
    run = Run()
    for request in requests:
        scheduler.add(request)
    while scheduler.has_unfinished():
        assert run.steps < limit, "no end in sight\n" + scheduler.dump()
        if drafter is not None:
            propose_some(scheduler, drafter)
        step(scheduler, model, run)
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
