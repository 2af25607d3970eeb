"""The contract between plan, commit, update and discard."""

from collections.abc import Callable

import pytest

from gristmill.runtime.kv_cache import PoolPlan
from gristmill.runtime.scheduler import Request, Scheduler, SchedulerConfig, StepPlan

from .harness import FakeModel, Run, expected_ids, step


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
    plan = scheduler.plan()
    a, b = plan.entries
    assert (a.id, a.start, a.count, a.samples, a.tokens) == ("a", 0, 10, True, list(range(10)))
    assert (b.id, b.start, b.count, b.samples, b.tokens) == ("b", 0, 22, False, list(range(5, 27)))
    assert (plan.num_tokens, plan.max_query, plan.max_context, plan.total_context) == (32, 22, 22, 32)
    assert plan.sampling() == [a]
    assert len(a.new_blocks) == 3 and len(b.new_blocks) == 6 and a.block_ids == []
    scheduler.commit(plan)
    assert a.block_ids == a.new_blocks == scheduler.requests["a"].block_ids
    assert a.slots(4) == [block * 4 + offset for block in a.block_ids for offset in range(4)][:10]
    assert [(o.id, list(o.new_ids), o.finish_reason) for o in scheduler.update(plan, [7])] == [
        ("a", [7], None)
    ]
    a, b = scheduler.plan().entries
    assert (a.id, a.start, a.count, a.samples, a.tokens, a.new_blocks) == ("a", 10, 1, True, [7], [])
    assert (b.id, b.start, b.count, b.samples, b.tokens) == ("b", 22, 13, True, list(range(27, 40)))


@pytest.mark.parametrize("number", [1, 2])
def test_planning_that_fails_midway_leaves_no_trace(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    model, run = FakeModel(scheduler.config), Run()
    step(scheduler, model, run)
    scheduler.add(Request("c", list(range(6)), 6))
    before = scheduler.snapshot()
    calls = 0
    take = PoolPlan.take

    def failing(self: PoolPlan, count: int) -> list[int]:
        nonlocal calls
        calls += 1
        if calls == number:
            raise MemoryError("planted")
        return take(self, count)

    monkeypatch.setattr(PoolPlan, "take", failing)
    with pytest.raises(MemoryError, match="planted"):
        scheduler.plan()
    monkeypatch.undo()
    assert scheduler.snapshot() == before
    while scheduler.has_unfinished():
        step(scheduler, model, run)
    assert run.outputs["c"] == expected_ids(range(6), 6)


def _another_step(scheduler: Scheduler) -> None:
    plan = scheduler.plan()
    scheduler.commit(plan)
    scheduler.update(plan, [1] * len(plan.sampling()))


@pytest.mark.parametrize("change", [_another_step, lambda s: s.abort(["a"])])
def test_a_stale_plan_is_refused_whole(scheduler: Scheduler, change: Callable[[Scheduler], object]) -> None:
    plan = scheduler.plan()
    change(scheduler)
    before = scheduler.snapshot()
    with pytest.raises(ValueError, match="stale"):
        scheduler.commit(plan)
    assert scheduler.snapshot() == before


def test_requests_may_come_between_plan_and_commit(scheduler: Scheduler) -> None:
    plan = scheduler.plan()
    scheduler.add(Request("c", [1, 2], 2, priority=-5))
    scheduler.commit(plan)
    scheduler.update(plan, [1])
    assert {entry.id for entry in scheduler.plan().entries} == {"a", "b", "c"}


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
    plan = scheduler.plan()
    scheduler.commit(plan)
    before = scheduler.snapshot()
    with pytest.raises(error, match=message):
        scheduler.update(plan, results)
    assert scheduler.snapshot() == before
    scheduler.update(plan, [3])


def test_accepted_tokens_must_be_the_drafts(scheduler: Scheduler) -> None:
    plan = scheduler.plan()
    scheduler.commit(plan)
    with pytest.raises(ValueError, match="in flight"):
        scheduler.propose("a", [1])
    scheduler.update(plan, [3])
    with pytest.raises(ValueError, match="not decoding"):
        scheduler.propose("b", [1])
    scheduler.propose("a", [4, 5, 6])
    plan = scheduler.plan()
    scheduler.commit(plan)
    assert plan.entries[0].tokens == [3, 4, 5, 6] and plan.entries[0].drafts == 3
    with pytest.raises(ValueError, match=r"accepted tokens \[4, 9\] are not the drafts \[4, 5, 6\]"):
        scheduler.update(plan, [[4, 9, 1], 8])
    outputs = scheduler.update(plan, [[4, 5, 1], 8])
    assert [list(output.new_ids) for output in outputs] == [[4, 5, 1], [8]]
    assert scheduler.requests["a"].output_ids == [3, 4, 5, 1]
    assert scheduler.requests["a"].computed == 10 + 1 + 2


def test_one_plan_at_a_time(scheduler: Scheduler) -> None:
    plan = scheduler.plan()
    with pytest.raises(ValueError, match="committed last"):
        scheduler.update(plan, [1])
    scheduler.commit(plan)
    with pytest.raises(RuntimeError, match="in flight"):
        scheduler.plan()
    with pytest.raises(ValueError, match="stale"):
        scheduler.commit(plan)
    with pytest.raises(ValueError, match="in flight"):
        scheduler.discard(StepPlan(0))
    scheduler.discard(plan)
    second_plan = scheduler.plan()
    assert [(e.id, e.start, e.count, e.new_blocks) for e in second_plan.entries] == [
        ("a", 0, 10, []),
        ("b", 0, 22, []),
    ]


def test_a_plan_is_independent_of_what_happens_to_its_requests(scheduler: Scheduler) -> None:
    """A runner that still reads the block table of an aborted request sees all of it."""
    plan = scheduler.plan()
    scheduler.commit(plan)
    table = list(plan.entries[0].block_ids)
    scheduler.abort(["a"])
    assert plan.entries[0].block_ids == table and len(table) == 3
