"""The contract between plan, commit, update and discard."""

from collections.abc import Callable

import pytest

from gristmill.runtime.kv_cache import PoolTransaction
from gristmill.runtime.scheduler import FinishReason, Request, ScheduledStep, Scheduler, SchedulerConfig

from .harness import FakeModel, Run, expected_ids, snapshot, step


@pytest.fixture
def scheduler() -> Scheduler:
    scheduler_of_two = Scheduler(
        SchedulerConfig(num_blocks=40, block_size=4, max_batch_tokens=32, max_seqs=4)
    )
    scheduler_of_two.add(Request("a", list(range(10)), 6))
    scheduler_of_two.add(Request("b", list(range(5, 40)), 6))
    return scheduler_of_two


def test_what_a_plan_says(scheduler: Scheduler) -> None:
    """Two prompts of 10 and 35 tokens under a budget of 32: one is scheduled whole, one is cut."""
    plan = scheduler.schedule()
    a, b = plan.entries
    assert (a.id, a.start, a.count, a.samples, a.tokens) == ("a", 0, 10, True, list(range(10)))
    assert (b.id, b.start, b.count, b.samples, b.tokens) == ("b", 0, 22, False, list(range(5, 27)))
    assert (plan.num_tokens, [entry.context for entry in plan.entries]) == (32, [10, 22])
    assert plan.sampling() == [a]
    assert len(a.new_blocks) == 3 and len(b.new_blocks) == 6 and a.block_ids == []
    scheduler.commit(plan)
    assert a.block_ids == a.new_blocks == scheduler.requests["a"].block_ids
    assert a.slots(4) == [block * 4 + offset for block in a.block_ids for offset in range(4)][:10]
    assert [(o.id, list(o.new_ids), o.finish_reason) for o in scheduler.update(plan, [7])] == [
        ("a", [7], None)
    ]
    a, b = scheduler.schedule().entries
    assert (a.id, a.start, a.count, a.samples, a.tokens, a.new_blocks) == ("a", 10, 1, True, [7], ())
    assert (b.id, b.start, b.count, b.samples, b.tokens) == ("b", 22, 13, True, list(range(27, 40)))


@pytest.mark.parametrize("number", [1, 2])
def test_planning_that_fails_midway_leaves_no_trace(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    model, run = FakeModel(scheduler.config), Run()
    step(scheduler, model, run)
    scheduler.add(Request("c", list(range(6)), 6))
    before = snapshot(scheduler)
    calls = 0
    take = PoolTransaction.take

    def failing(self: PoolTransaction, count: int) -> list[int]:
        nonlocal calls
        calls += 1
        if calls == number:
            raise MemoryError("planted")
        return take(self, count)

    monkeypatch.setattr(PoolTransaction, "take", failing)
    with pytest.raises(MemoryError, match="planted"):
        scheduler.schedule()
    monkeypatch.undo()
    assert snapshot(scheduler) == before
    while scheduler.has_unfinished():
        step(scheduler, model, run)
    assert run.outputs["c"] == expected_ids(range(6), 6)


def _another_step(scheduler: Scheduler) -> None:
    plan = scheduler.schedule()
    scheduler.commit(plan)
    scheduler.update(plan, [1] * len(plan.sampling()))


@pytest.mark.parametrize("change", [_another_step, lambda s: s.abort(["a"])])
def test_a_stale_plan_is_refused_whole(scheduler: Scheduler, change: Callable[[Scheduler], object]) -> None:
    plan = scheduler.schedule()
    change(scheduler)
    before = snapshot(scheduler)
    with pytest.raises(ValueError, match="stale"):
        scheduler.commit(plan)
    assert snapshot(scheduler) == before


def test_requests_may_come_between_plan_and_commit(scheduler: Scheduler) -> None:
    plan = scheduler.schedule()
    scheduler.add(Request("c", [1, 2], 2, priority=-5))
    scheduler.commit(plan)
    scheduler.update(plan, [1])
    assert {entry.id for entry in scheduler.schedule().entries} == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("results", "error", "message"),
    [
        ([], ValueError, "samples for 1 requests, got 0"),
        ([1, 2], ValueError, "samples for 1 requests, got 2"),
        ([1.5], TypeError, "int.*got float"),
        ([[]], ValueError, "1 to 1 tokens expected for 0 drafts, got 0"),
        ([[1, 2]], ValueError, "got 2"),
    ],
)
def test_results_that_do_not_fit_change_nothing(
    scheduler: Scheduler, results: list[int], error: type[Exception], message: str
) -> None:
    plan = scheduler.schedule()
    scheduler.commit(plan)
    before = snapshot(scheduler)
    with pytest.raises(error, match=message):
        scheduler.update(plan, results)
    assert snapshot(scheduler) == before
    scheduler.update(plan, [3])


def test_accepted_tokens_must_be_the_drafts(scheduler: Scheduler) -> None:
    plan = scheduler.schedule()
    scheduler.commit(plan)
    with pytest.raises(ValueError, match="in flight"):
        scheduler.propose("a", [1])
    scheduler.update(plan, [3])
    with pytest.raises(ValueError, match="not decoding"):
        scheduler.propose("b", [1])
    scheduler.propose("a", [4, 5, 6])
    plan = scheduler.schedule()
    scheduler.commit(plan)
    assert plan.entries[0].tokens == [3, 4, 5, 6] and plan.entries[0].drafts == 3
    with pytest.raises(ValueError, match=r"accepted tokens \[4, 9\] are not the drafts \[4, 5, 6\]"):
        scheduler.update(plan, [[4, 9, 1], 8])
    outputs = scheduler.update(plan, [[4, 5, 1], 8])
    assert [list(output.new_ids) for output in outputs] == [[4, 5, 1], [8]]
    assert scheduler.requests["a"].output_ids == [3, 4, 5, 1]
    assert scheduler.requests["a"].computed == 10 + 1 + 2


def test_two_plans_at_a_time(scheduler: Scheduler) -> None:
    plan = scheduler.schedule()
    with pytest.raises(ValueError, match="oldest step in flight"):
        scheduler.update(plan, [1])
    scheduler.commit(plan)
    with pytest.raises(ValueError, match="stale"):
        scheduler.commit(plan)
    ahead = scheduler.schedule()
    scheduler.commit(ahead)
    with pytest.raises(RuntimeError, match="2 committed steps are in flight"):
        scheduler.schedule()
    with pytest.raises(ValueError, match="oldest step in flight"):
        scheduler.update(ahead, [1, 2])
    with pytest.raises(ValueError, match="a step in flight"):
        scheduler.discard(ScheduledStep(0))
    scheduler.discard(plan)  # and the one that was planned over its results
    assert scheduler.in_flight == []
    scheduler.check()
    second_plan = scheduler.schedule()
    assert [(e.id, e.start, e.count, e.new_blocks) for e in second_plan.entries] == [
        ("a", 0, 10, ()),
        ("b", 0, 22, ()),
    ]


def test_a_plan_is_independent_of_what_happens_to_its_requests(scheduler: Scheduler) -> None:
    """A runner that still reads the block table of an aborted request sees all of it."""
    plan = scheduler.schedule()
    scheduler.commit(plan)
    table = list(plan.entries[0].block_ids)
    scheduler.abort(["a"])
    assert plan.entries[0].block_ids == table and len(table) == 3


def test_a_step_ahead_counts_tokens_that_are_not_known(scheduler: Scheduler) -> None:
    """While the first step is in flight, "a" is planned with a token on the device, "b" with the rest of its prompt."""
    first = scheduler.schedule()
    scheduler.commit(first)
    assert [(entry.id, entry.row) for entry in first.entries] == [("a", 0), ("b", 1)]
    second = scheduler.schedule()
    a, b = second.entries
    assert (a.id, a.start, a.count, a.samples, a.tokens, a.row) == ("a", 10, 1, True, None, 0)
    assert (b.id, b.start, b.count, b.samples, b.tokens) == ("b", 22, 13, True, list(range(27, 40)))
    scheduler.commit(second)
    assert scheduler.requests["a"].pending == 2 and scheduler.requests["a"].computed == 11
    assert [list(output.new_ids) for output in scheduler.update(first, [7])] == [[7]]
    assert scheduler.requests["a"].tokens[10:] == [7] and scheduler.requests["a"].pending == 1
    assert scheduler.requests["a"].registered == 2  # of the 11 tokens, 10 are computed by the first step
    scheduler.check()


def test_what_a_stop_leaves_in_flight_is_dropped() -> None:
    """An end token is known one step late; the step ahead still has the request, whose row and blocks are given away."""
    scheduler = Scheduler(SchedulerConfig(num_blocks=4, block_size=4, max_batch_tokens=32, max_seqs=1))
    scheduler.add(Request("a", [1, 2, 3], 9, stop_ids=[7]))
    scheduler.commit(first := scheduler.schedule())
    scheduler.commit(ahead := scheduler.schedule())
    scheduler.add(Request("b", [1] * 8, 9))
    (output,) = scheduler.update(first, [7])
    assert output.finish_reason is FinishReason.STOP and not scheduler.serves(ahead)
    scheduler.check()
    scheduler.commit(other := scheduler.schedule())
    assert [(entry.id, entry.row) for entry in other.entries] == [("b", 0)]
    assert scheduler.update(ahead, [7]) == []  # and the pool has got its blocks once
    scheduler.check()
    assert [output.id for output in scheduler.update(other, [9])] == ["b"]


def test_results_go_to_the_request_that_they_were_computed_for(scheduler: Scheduler) -> None:
    """An id may be used again while a step of its former owner is in flight."""
    scheduler.commit(plan := scheduler.schedule())
    assert [output.id for output in scheduler.abort(["a"])] == ["a"]
    scheduler.add(Request("a", [1, 2], 6))
    assert scheduler.update(plan, [7]) == []
    assert scheduler.requests["a"].tokens == [1, 2]
    scheduler.check()


def test_a_length_that_is_reached_in_flight_is_planned_no_further(scheduler: Scheduler) -> None:
    scheduler.add(Request("c", [1, 2], 2))
    scheduler.abort(["a", "b"])
    for _ in range(2):
        scheduler.commit(scheduler.schedule())
        scheduler.check()
    first, second = scheduler.in_flight
    scheduler.update(first, [5])
    assert scheduler.schedule().entries == []  # nothing to do before the results, and not stuck
    (output,) = scheduler.update(second, [6])
    assert output.finish_reason is FinishReason.LENGTH and not scheduler.has_unfinished()


def test_nobody_is_preempted_while_a_step_is_in_flight() -> None:
    scheduler = Scheduler(
        SchedulerConfig(num_blocks=4, block_size=2, max_batch_tokens=32, max_seqs=2, watermark=0)
    )
    for name in "ab":
        scheduler.add(Request(name, [1, 2, 3], 5))
    scheduler.commit(first := scheduler.schedule())
    scheduler.commit(second := scheduler.schedule())
    scheduler.update(first, [5, 5])
    assert scheduler.schedule().entries == []  # "a" and "b" need a block each, and there is none
    scheduler.update(second, [6, 6])
    plan = scheduler.schedule()
    assert plan.preempted == ["b"] and [entry.tokens for entry in plan.entries] == [[6]]


def test_a_step_with_drafts_is_followed_by_its_results(scheduler: Scheduler) -> None:
    scheduler.commit(plan := scheduler.schedule())
    scheduler.update(plan, [3])
    scheduler.propose("a", [4, 5])
    scheduler.commit(drafted := scheduler.schedule())
    scheduler.check()
    assert drafted.has_drafts and scheduler.schedule().entries == []
    scheduler.update(drafted, [[4, 9], 8])
    assert {entry.id for entry in scheduler.schedule().entries} == {"a", "b"}


def test_a_row_without_a_result_ends_its_request_alone(scheduler: Scheduler) -> None:
    scheduler.add(Request("c", [1, 2, 3, 4, 5], 4))
    scheduler.commit(plan := scheduler.schedule())
    scheduler.commit(ahead := scheduler.schedule())
    assert [(o.id, list(o.new_ids), o.finish_reason) for o in scheduler.update(plan, [-1])] == [
        ("a", [], FinishReason.ERROR)
    ]
    assert scheduler.cache is not None and len(scheduler.cache) == 5  # of "b": nothing of "a" is shared
    results = [-1 if entry.id == "a" else 1 for entry in ahead.sampling()]
    assert "a" not in [output.id for output in scheduler.update(ahead, results)]
    scheduler.check()
