"""Each check must fail on the fault that it exists for: schedulers broken on purpose."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from gristmill.runtime.kv_cache import BlockPool, PoolError, PoolTransaction, PrefixCache
from gristmill.runtime.scheduler import (
    FinishReason,
    Request,
    ScheduledRequest,
    ScheduledStep,
    Scheduler,
    SchedulerConfig,
    SchedulerStuck,
)
from gristmill.runtime.scheduler.step_builder import StepBuilder

from .harness import FakeModel, SlotFunction, expected_ids, run_all

CONFIG = SchedulerConfig(num_blocks=14, block_size=4, max_seqs=4, max_batch_tokens=24)
GROUPS = replace(CONFIG, num_blocks=36, windows=(0, 9, 3))
CAUGHT = (AssertionError, PoolError, SchedulerStuck, KeyError, IndexError, ValueError)


def verdict(
    make: Callable[[], Scheduler],
    slots_of: SlotFunction = ScheduledRequest.slots,
    limit: int = 2_000,
    depth: int = 1,
) -> bool:
    """Whether every run of a mix that preempts, evicts and shares passes every check."""
    for seed in range(6):
        rng = random.Random(seed)
        base = [rng.randrange(50) for _ in range(40)]
        prompts = [base[:16], base[:16], base[:16]]
        for _ in range(10):
            prompts.append(
                base[: rng.randint(0, 12) * 3] + [rng.randrange(50) for _ in range(rng.randint(1, 6))]
            )
        scheduler = make()
        try:
            run = run_all(
                scheduler,
                [Request(str(i), p, 12) for i, p in enumerate(prompts)],
                FakeModel(scheduler.config, slots_of),
                limit,
                depth=depth,
            )
        except CAUGHT:
            return False
        for i, tokens in enumerate(prompts):
            if run.outputs[str(i)] != expected_ids(tokens, 12, capacity=scheduler.config.capacity):
                return False
    return True


def test_the_honest_scheduler_passes() -> None:
    assert verdict(lambda: Scheduler(CONFIG))


class LeaksABlock(Scheduler):
    def _finish(self, request: Request, reason: FinishReason) -> None:
        if len(request.block_ids) > 1:
            request.block_ids = request.block_ids[:-1]
        super()._finish(request, reason)


class FreesTwice(Scheduler):
    def _finish(self, request: Request, reason: FinishReason) -> None:
        self.pool.release(request.block_ids[:1])
        super()._finish(request, reason)


class RegistersBeforeComputed(Scheduler):
    """Planted fault: registers full blocks when they are allocated, before the step that computes them has
    run."""

    def commit(self, plan: ScheduledStep) -> None:
        super().commit(plan)
        for entry in plan.entries:
            request = self.requests[entry.id]
            assert self.cache is not None
            self._register(self.cache, request, entry.context)


def test_blocks_announced_before_they_are_computed_are_caught() -> None:
    """The step is lost and its request aborted; then another request has the same prefix."""

    def is_right(scheduler: Scheduler) -> bool:
        scheduler.add(Request("a", list(range(20)), 5))
        plan = scheduler.schedule()
        scheduler.commit(plan)
        scheduler.discard(plan)
        scheduler.abort(["a"], FinishReason.ERROR)
        try:
            run = run_all(scheduler, [Request("b", list(range(22)), 5)])
        except CAUGHT:
            return False
        return run.outputs["b"] == expected_ids(range(22), 5)

    assert is_right(Scheduler(CONFIG))
    assert not is_right(RegistersBeforeComputed(CONFIG))


class KeepsComputedOnPreemption(Scheduler):
    def _preempt(self, request: Request) -> None:
        computed = request.computed
        super()._preempt(request)
        request.computed = computed


class AdvancesTooFar(Scheduler):
    def update(self, plan, sampled_ids):
        outputs = super().update(plan, sampled_ids)
        for request in self.running:
            if len(request.tokens) - request.computed > 3:
                request.computed += 1
        return outputs


class LosesAPreempted(Scheduler):
    def _enqueue(self, request: Request) -> None:
        super()._enqueue(request)
        if request.preemptions:
            self.waiting.remove(request)


class AllHit(PrefixCache):
    def _max_hit(self, tokens: int) -> int:
        return tokens // self._pool.block_size


class IgnoresTokens(PrefixCache):
    """Planted fault: hashes only the block, not the tokens before it."""

    def extend_hashes(self, hashes, tokens, extra=None):
        hashes.extend(range(len(hashes), len(tokens) // 4))

    def match(self, hashes, tokens, extra=None, evicted=()):
        blocks = []
        for hash_ in hashes[: self._max_hit(len(tokens))]:
            if hash_ not in self._table:
                break
            if self._table[hash_].blocks[0] in evicted:
                break
            blocks.append(self._table[hash_])
        return blocks


class SkipsTheNext(StepBuilder):
    """Planted fault: after a preemption the next request is never scheduled, because the cursor is not moved
    back."""

    def _make_room(self, blocks, request, running):
        return False if blocks > self.pool.available else super()._make_room(blocks, request, running)


class AllocatesOneTooFew(StepBuilder):
    def _schedule(self, request, start, tokens, samples, new, drafts):
        super()._schedule(request, start, tokens, samples, new[:-1] if len(new) > 2 else new, drafts)


class PlansBehindItsBlocks(Scheduler):
    """Planted fault: a request counts as steady up to its end, whatever blocks it has."""

    def _steady(self, request: Request) -> int:
        return request.limit - 1 if super()._steady(request) else 0


class StaysSteady(Scheduler):
    """Planted fault: a request whose prompt is not complete counts as steady."""

    def _steady(self, request: Request) -> int:
        return min(request.limit - 1, len(request.block_ids) * self.config.block_size)


class IgnoresBudget(StepBuilder):
    def _chunk(self, start: int, known: int) -> int:
        return known - start


class NeverAdmits(StepBuilder):
    def _admit(self, running, prefills, waiting):
        if len(running) < 1:
            super()._admit(running, prefills, waiting[1:])


class ForgetsEvictions(PoolTransaction):
    """Planted fault: hits blocks that the same plan has evicted."""

    def take(self, count: int) -> list[int]:
        blocks = super().take(count)
        self.evicted.clear()
        return blocks


def with_cache(kind: type[PrefixCache]) -> Scheduler:
    scheduler = Scheduler(CONFIG)
    scheduler.pool.on_evict = None
    scheduler.cache = kind(scheduler.pool)
    return scheduler


def with_builder(kind: type[StepBuilder]) -> Scheduler:
    class Broken(Scheduler):
        def _builder(self) -> StepBuilder:
            ahead = bool(self.in_flight)
            return kind(self.config, PoolTransaction(self.pool), self.cache, self._version, ahead)

    return Broken(CONFIG)


def with_pool_plan(kind: type[PoolTransaction]) -> Scheduler:
    class Broken(Scheduler):
        def _builder(self) -> StepBuilder:
            return StepBuilder(self.config, kind(self.pool), self.cache, self._version)

    return Broken(CONFIG)


@pytest.mark.parametrize(
    "fault",
    [
        LeaksABlock,
        FreesTwice,
        KeepsComputedOnPreemption,
        AdvancesTooFar,
        LosesAPreempted,
        PlansBehindItsBlocks,
        StaysSteady,
    ],
)
def test_faults_of_the_scheduler_are_caught(fault: type[Scheduler]) -> None:
    assert not verdict(lambda: fault(CONFIG))


@pytest.mark.parametrize("fault", [AllHit, IgnoresTokens])
def test_faults_of_the_prefix_cache_are_caught(fault: type[PrefixCache]) -> None:
    assert not verdict(lambda: with_cache(fault))


@pytest.mark.parametrize("fault", [SkipsTheNext, AllocatesOneTooFew, IgnoresBudget, NeverAdmits])
def test_faults_of_the_step_builder_are_caught(fault: type[StepBuilder]) -> None:
    assert not verdict(lambda: with_builder(fault))


class ReleasesTooEarly(Scheduler):
    def _release_behind(self, request: Request, computed: int) -> None:
        super()._release_behind(request, computed + 4)


class ReleasesAtPlanning(Scheduler):
    """Planted fault: blocks behind a step in flight are given back before its results; it is discarded."""

    def commit(self, plan: ScheduledStep) -> None:
        super().commit(plan)
        for entry in plan.entries:
            self._release_behind(self.requests[entry.id], entry.context)


class NeverReleases(Scheduler):
    def _release_behind(self, request: Request, computed: int) -> None:
        pass


class KeepsReleased(Scheduler):
    """Planted fault: a block that was given back stays in the table."""

    def _release_behind(self, request: Request, computed: int) -> None:
        table = list(request.block_ids)
        super()._release_behind(request, computed)
        request.block_ids[:] = table


class IgnoresWindows(PrefixCache):
    """Planted fault: a prefix is found by the blocks of full attention alone."""

    def _longest(self, hits, length, group, evicted):
        return length if group else super()._longest(hits, length, group, evicted)


class NeedsOneTooFew(PrefixCache):
    def table(self, hits):
        table = super().table(hits)
        return [self._pool.num_blocks if i == len(table) - 2 else block for i, block in enumerate(table)]


def test_the_honest_scheduler_of_groups_passes() -> None:
    assert verdict(lambda: Scheduler(GROUPS))
    assert verdict(lambda: Scheduler(GROUPS), depth=2)


@pytest.mark.parametrize("fault", [ReleasesTooEarly, ReleasesAtPlanning, NeverReleases, KeepsReleased])
def test_faults_of_releasing_behind_windows_are_caught(fault: type[Scheduler]) -> None:
    assert not verdict(lambda: fault(GROUPS))


@pytest.mark.parametrize("fault", [IgnoresWindows, NeedsOneTooFew])
def test_faults_of_hits_over_groups_are_caught(fault: type[PrefixCache]) -> None:
    def broken() -> Scheduler:
        scheduler = Scheduler(GROUPS)
        scheduler.pool.on_evict = None
        scheduler.cache = fault(scheduler.pool, windows=GROUPS.windows)
        return scheduler

    assert not verdict(broken)


def test_hits_on_blocks_given_away_in_the_same_plan_are_caught() -> None:
    assert not verdict(lambda: with_pool_plan(ForgetsEvictions))


def off_by_one(entry: ScheduledRequest, block_size: int) -> list[int]:
    return [slot + 1 for slot in ScheduledRequest.slots(entry, block_size)]


def off_by_one_in_last_block(entry: ScheduledRequest, block_size: int) -> list[int]:
    slots = ScheduledRequest.slots(entry, block_size)
    return [slot ^ 1 if entry.start + i > 20 else slot for i, slot in enumerate(slots)]


def first_block_only(entry: ScheduledRequest, block_size: int) -> list[int]:
    return [entry.block_ids[0] * block_size + p % block_size for p in range(entry.start, entry.context)]


@pytest.mark.parametrize("fault", [off_by_one, off_by_one_in_last_block, first_block_only])
def test_wrong_slots_are_caught(fault: SlotFunction) -> None:
    assert not verdict(lambda: Scheduler(CONFIG), fault)


class PreemptsInFlight(Scheduler):
    """Planted fault: requests are preempted while a step that samples for them is in flight."""

    def _builder(self) -> StepBuilder:
        return StepBuilder(self.config, PoolTransaction(self.pool), self.cache, self._version)


class KeepsPending(Scheduler):
    """Planted fault: the number of tokens in flight of a request is one too large after its first token."""

    def update(self, plan, sampled_ids):
        outputs = super().update(plan, sampled_ids)
        for request in self.running:
            if len(request.tokens) == request.prompt_len + 1:
                request.pending += 1
        return outputs


class RegistersInFlight(Scheduler):
    """Planted fault: a block is registered although the step that fills it is still in flight."""

    def _register(self, cache: PrefixCache, request: Request, computed: int) -> None:
        super()._register(cache, request, min(request.computed, len(request.tokens)))


class GivesRowsTwice(Scheduler):
    """Planted fault: the row of a request that ends is free twice."""

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self.free_rows.append(request.row)
        super()._finish(request, reason)


class RunsPastTheEnd(Scheduler):
    """Planted fault: a request whose last token is in flight is planned once more."""

    def schedule(self) -> ScheduledStep:
        for request in self.requests.values():
            request.limit += 1
        try:
            return super().schedule()
        finally:
            for request in self.requests.values():
                request.limit -= 1


@pytest.mark.parametrize(
    "fault",
    [
        PreemptsInFlight,
        KeepsPending,
        RegistersInFlight,
        GivesRowsTwice,
        RunsPastTheEnd,
        PlansBehindItsBlocks,
        StaysSteady,
        LeaksABlock,
        FreesTwice,
    ],
)
def test_faults_with_two_steps_in_flight_are_caught(fault: type[Scheduler]) -> None:
    assert verdict(lambda: Scheduler(CONFIG), depth=2)
    assert not verdict(lambda: fault(CONFIG), depth=2)


class WrongEnd(BlockPool):
    """Planted fault: evicts the most recently used block."""

    def _link(self, block: int, before: int, behind: int) -> None:
        if self.content[block] is not None:
            before, behind = self.num_blocks, self._next[self.num_blocks]
        super()._link(block, before, behind)


def test_eviction_order_is_seen() -> None:
    def left_after(pool: BlockPool) -> list[int]:
        blocks = pool.allocate(2)
        for block in blocks:
            pool.register(block, block)
            pool.release([block])
        pool.allocate(3)
        return [b for b in blocks if pool.content[b] is not None]

    assert left_after(BlockPool(4, 4)) == [1]
    assert left_after(WrongEnd(4, 4)) != [1]
