"""What a step may use: reserves at admission, drafts, aligned chunks."""

import pytest

from gristmill.runtime.scheduler import Request, Scheduler, SchedulerConfig

from .harness import FakeModel, Run, expected_ids, run_all, step


def make(num_blocks: int, **options: object) -> tuple[Scheduler, FakeModel, Run]:
    scheduler = Scheduler(
        SchedulerConfig(num_blocks=num_blocks, block_size=4, **{"watermark": 0.0, **options})
    )
    return scheduler, FakeModel(scheduler.config), Run()


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(7 * i + 13 * seed) % 41 for i in range(length)]


def test_a_prompt_is_admitted_only_where_all_of_it_fits() -> None:
    """The first chunk would fit at once, but admitting the prompt for it would only cause preemptions."""
    scheduler, model, run = make(20, max_chunk=8, max_bypass=0)
    scheduler.add(Request("old", prompt(30), 3))
    scheduler.add(Request("long", prompt(60, 1), 3))
    while scheduler.has_unfinished():
        step(scheduler, model, run)
    assert run.preemptions == 0


def test_blocks_owed_to_a_prompt_under_way_are_not_given_to_another() -> None:
    scheduler, model, run = make(20, max_chunk=8, max_bypass=0)
    for i in range(2):
        # Each needs 12 of 20 blocks, 2 of them in the first step.
        scheduler.add(Request(str(i), prompt(48, i), 3))
    assert list(step(scheduler, model, run).admitted) == ["0"]
    assert list(step(scheduler, model, run).admitted) == []
    while scheduler.has_unfinished():
        step(scheduler, model, run)
    assert run.preemptions == 0


def test_the_watermark_is_kept_free_while_others_run() -> None:
    scheduler, model, run = make(20, watermark=0.25, max_bypass=0)
    scheduler.add(Request("a", prompt(39), 9))
    scheduler.add(Request("b", prompt(24, 1), 9))  # 6 of 10 blocks are left, but 5 must stay free
    assert list(step(scheduler, model, run).admitted) == ["a"]
    empty, _, _ = make(20, watermark=0.25)
    empty.add(Request("c", prompt(79), 9))  # nothing runs: the whole pool is available
    assert list(empty.schedule().admitted) == ["c"]


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    scheduler, model, run = make(6, max_seqs=8, max_batch_tokens=40, prefix_caching=False)
    scheduler.add(Request("a", prompt(11), 12))
    scheduler.add(Request("b", prompt(11, 1), 12))
    preempting_steps = 0
    while scheduler.has_unfinished():
        if run.steps == 1:
            scheduler.add(Request("tiny", [3], 2))
        plan = step(scheduler, model, run)
        preempting_steps += bool(plan.preempted)
        assert not (plan.preempted and plan.admitted)
    assert preempting_steps


def test_bypasses_are_counted_anew_after_each_admission() -> None:
    scheduler, model, run = make(50, max_batch_tokens=400, max_seqs=64, max_bypass=2)
    scheduler.add(Request("old", prompt(36), 4))
    step(scheduler, model, run)
    heavy = Request("heavy", prompt(180, 1), 2)
    scheduler.add(heavy)
    scheduler.add(Request("light", prompt(3), 2))
    step(scheduler, model, run)
    assert heavy.bypassed == 1
    while "heavy" not in {r.id for r in scheduler.running}:
        step(scheduler, model, run)
    assert heavy.bypassed == 0


def test_drafts_are_given_up_before_anyone_is_preempted() -> None:
    scheduler, model, run = make(4, max_batch_tokens=40, max_seqs=2)
    scheduler.add(Request("a", prompt(6), 3))
    scheduler.add(Request("b", prompt(6, 1), 3))
    step(scheduler, model, run)
    for request in scheduler.running:
        scheduler.propose(request.id, expected_ids(request.tokens, 2))
    plan = step(scheduler, model, run)
    assert not plan.preempted and [entry.drafts for entry in plan.entries] == [1, 1]
    full, model, run = make(4, max_batch_tokens=40, max_seqs=2)
    full.add(Request("a", prompt(7), 8))
    full.add(Request("b", prompt(7, 1), 2))
    step(full, model, run)
    full.propose("a", [1, 2, 3])  # would need a third block
    plan = step(full, model, run)
    assert not plan.preempted and [entry.drafts for entry in plan.entries] == [0, 0]


@pytest.mark.parametrize(("remaining", "drafts"), [(1, 0), (2, 1), (5, 4), (9, 6)])
def test_no_more_drafts_than_outputs_still_wanted(remaining: int, drafts: int) -> None:
    """The last requested token is sampled after the drafts, so there is one draft fewer."""
    scheduler, model, run = make(40)
    scheduler.add(Request("a", prompt(6), 1 + remaining))
    step(scheduler, model, run)
    scheduler.propose("a", [1] * 6)
    assert scheduler.schedule().entries[0].drafts == drafts


@pytest.mark.parametrize("length", [1, 3, 4, 5, 31, 32, 33])
@pytest.mark.parametrize("max_chunk", [4, 7, None])
def test_aligned_chunks_end_at_blocks_and_the_last_is_never_cut(length: int, max_chunk: int | None) -> None:
    """Alone, among decodes that use part of the budget, and on a cache hit, the chunk that samples is the
    same."""
    last = {}
    for others in (0, 5):
        scheduler, model, run = make(
            60, max_chunk=max_chunk, align_chunks=True, max_batch_tokens=10, max_seqs=7, prefix_caching=True
        )
        for i in range(others):
            scheduler.add(Request(f"d{i}", [i], 60))
        for _ in range(others):
            step(scheduler, model, run)
        for name in ("miss", "hit"):
            scheduler.add(Request(name, prompt(length), 1))
            while name not in run.reasons:
                for entry in step(scheduler, model, run).entries:
                    if entry.id == name and entry.samples:
                        last[others, name] = (entry.start, entry.count)
                    elif entry.id == name:
                        assert entry.context % 4 == 0
            assert run.outputs[name] == expected_ids(prompt(length), 1)
    boundary = (length - 1) // 4 * 4
    assert set(last.values()) == {(boundary, length - boundary)}


def test_a_key_separates_prefixes() -> None:
    scheduler, model, _ = make(40)
    for name, key, hit in (("a", None, 0), ("b", "adapter", 0), ("c", None, 16), ("d", "adapter", 16)):
        request = Request(name, prompt(18), 1, cache_key=key)
        run_all(scheduler, [request], model)
        assert request.cached_tokens == hit


def test_an_aligned_last_chunk_waits_rather_than_being_cut() -> None:
    scheduler, model, run = make(40, align_chunks=True, max_batch_tokens=10, max_seqs=4)
    scheduler.add(Request("a", prompt(12), 1))
    scheduler.add(Request("b", prompt(3, 1), 1))
    plans = [step(scheduler, model, run) for _ in range(2)]  # 8 of 10 tokens go to a: 2 are too few for b
    assert [[(e.id, e.start, e.count) for e in plan.entries] for plan in plans] == [
        [("a", 0, 8)],
        [("a", 8, 4), ("b", 0, 3)],
    ]
