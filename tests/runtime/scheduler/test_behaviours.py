"""Behaviours and bugs of known schedulers, one test each. Numbers in names are vLLM issues or pull requests."""

import gc
import weakref

import pytest

from gristmill.runtime.scheduler import (
    FinishReason,
    Pause,
    QueueFull,
    Request,
    RequestTooLarge,
    Scheduler,
    SchedulerConfig,
    SchedulerStuck,
    step_builder,
)
from gristmill.runtime.scheduler.step_builder import StepBuilder

from .harness import FakeModel, Run, expected_ids, launch, run_all, snapshot_of_request, step, take


def make(num_blocks: int = 50, **options: object) -> Scheduler:
    return Scheduler(SchedulerConfig(num_blocks=num_blocks, **{"watermark": 0.0, **options}))


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(7 * i + 13 * seed) % 41 for i in range(length)]


def test_35570_request_larger_than_the_pool_is_refused_and_starves_nobody() -> None:
    scheduler = make(49, block_size=16)
    with pytest.raises(
        RequestTooLarge, match=r"'big'.*1002 prompt tokens.*63 blocks of 16.*49 blocks \(784 tokens\)"
    ):
        scheduler.add(Request("big", prompt(1002), 10))
    run = run_all(scheduler, [Request("a", prompt(20), 5), Request("b", prompt(30, 1), 5)])
    assert {k: len(v) for k, v in run.outputs.items()} == {"a": 5, "b": 5}


def test_35570_prompt_fits_but_output_does_not_ends_by_length() -> None:
    """Also for a running request that outgrows the pool while it decodes, with another request in its way."""
    scheduler = make(4, block_size=4, max_seqs=2, max_batch_tokens=16)
    run = run_all(scheduler, [Request("a", prompt(9), 1000), Request("b", prompt(6, 1), 1000)])
    assert run.reasons == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH}
    assert run.outputs["a"] == expected_ids(prompt(9), 7)  # 9 + 7 tokens = 4 blocks of 4
    assert run.outputs["b"] == expected_ids(prompt(6, 1), 10)


@pytest.mark.parametrize(("length", "fits"), [(15, True), (16, False)])
def test_capacity_edge(length: int, fits: bool) -> None:
    for config in (
        SchedulerConfig(num_blocks=4, block_size=4, max_seqs=1),
        SchedulerConfig(num_blocks=99, block_size=4, max_seqs=1, max_model_len=16),
    ):
        scheduler = Scheduler(config)
        if fits:
            run = run_all(scheduler, [Request("a", prompt(length), 50)])
            assert run.reasons["a"] is FinishReason.LENGTH and len(run.outputs["a"]) == 1
        else:
            with pytest.raises(RequestTooLarge, match="17 tokens"):
                scheduler.add(Request("a", prompt(length), 50))


def test_45387_held_requests_use_no_seat_and_no_block() -> None:
    scheduler = make(8, block_size=4, max_seqs=2, max_batch_tokens=16)
    for i in range(3):
        scheduler.add(Request(f"held{i}", prompt(8, i), 2), held=True)
    assert scheduler.schedule().entries == []  # all wait for an external event, which is no error
    model, run = FakeModel(scheduler.config), Run()
    scheduler.add(Request("a", prompt(20), 3))
    scheduler.add(Request("b", prompt(6, 5), 3))
    # One token budget, a prompt of 20 tokens.
    assert {entry.id for entry in step(scheduler, model, run).entries} == {"a"}
    while "b" not in run.reasons:
        step(scheduler, model, run)
    for i in (2, 0, 1):
        scheduler.resume(f"held{i}")
    assert [r.id for r in scheduler.waiting] == ["held0", "held1", "held2"]
    while scheduler.has_unfinished():
        step(scheduler, model, run)
    assert run.outputs["held1"] == expected_ids(prompt(8, 1), 2)


def heavy_head(max_bypass: int, light: int) -> tuple[Scheduler, FakeModel, Run]:
    """Returns a pool of 50 with one running request that holds 10; a request that needs 45 is first in the
    queue, light ones follow."""
    scheduler = make(50, block_size=4, max_seqs=64, max_batch_tokens=400, max_bypass=max_bypass)
    model, run = FakeModel(scheduler.config), Run()
    scheduler.add(Request("old", prompt(36), 5))
    step(scheduler, model, run)
    scheduler.add(Request("heavy", prompt(180, 1), 2))
    for i in range(light):
        scheduler.add(Request(f"light{i}", prompt(3, 2 + i), 30))
    return scheduler, model, run


def test_33499_light_requests_pass_a_heavy_head() -> None:
    scheduler, _, _ = heavy_head(8, 2)
    assert list(scheduler.schedule().admitted) == ["light0", "light1"]


def test_33499_a_head_is_bypassed_at_most_k_times() -> None:
    scheduler, model, run = heavy_head(3, 10)
    order = []
    while scheduler.has_unfinished():
        order += list(step(scheduler, model, run).admitted)
    assert order[:4] == ["light0", "light1", "light2", "heavy"]  # nothing younger passes "heavy" again
    assert run.outputs["heavy"] == expected_ids(prompt(180, 1), 2)
    strict, _, _ = heavy_head(0, 2)
    assert list(strict.schedule().admitted) == []


def test_32173_skipped_requests_keep_their_order() -> None:
    scheduler = make(50, block_size=4, max_seqs=64, max_batch_tokens=400, max_bypass=1000)
    model, run = FakeModel(scheduler.config), Run()
    scheduler.add(Request("old", prompt(36), 120))
    step(scheduler, model, run)
    for name, length in (("R1", 180), ("R2", 184), ("R3", 3), ("R4", 188)):
        scheduler.add(Request(name, prompt(length, len(name)), 2))
    assert list(step(scheduler, model, run).admitted) == ["R3"]
    for _ in range(100):
        assert [r.id for r in scheduler.waiting] == ["R1", "R2", "R4"]
        step(scheduler, model, run)


def test_49206_priority_preemption_skips_nobody() -> None:
    """A is preempted while B is scheduled: C must still be visited in the same step."""
    scheduler = make(
        6, block_size=4, max_seqs=3, max_batch_tokens=30, policy="priority", prefix_caching=False
    )
    model, run = FakeModel(scheduler.config), Run()
    for name, priority, length in (("A", 9, 5), ("B", 0, 7), ("C", 0, 5)):
        request = Request(name, prompt(length, ord(name)), 6, priority=priority)
        scheduler.add(request)
        step(scheduler, model, run)  # one by one, so that A is first in the running list
    assert [r.id for r in scheduler.running] == ["A", "B", "C"]
    for _ in range(10):
        plan = step(scheduler, model, run)
        if plan.preempted:
            break
    assert plan.preempted == ["A"]
    assert {entry.id for entry in plan.entries} == {"B", "C"}
    while scheduler.has_unfinished():
        step(scheduler, model, run)
    assert run.outputs["A"] == expected_ids(prompt(5, ord("A")), 6)


def test_33743_inter_prefill_budget() -> None:
    def first_steps(limit: int | None) -> list[list[str]]:
        scheduler = make(400, block_size=16, max_batch_tokens=4096, inter_prefill_budget=limit)
        model, run = FakeModel(scheduler.config), Run()
        scheduler.add(Request("d", prompt(5), 9))
        step(scheduler, model, run)
        scheduler.add(Request("p", prompt(1024, 1), 9))
        scheduler.add(Request("q", prompt(1024, 2), 9))
        return [sorted(entry.id for entry in step(scheduler, model, run).entries) for _ in range(2)]

    assert first_steps(1024) == [["d", "p"], ["d", "p", "q"]]  # decode is never delayed
    assert first_steps(None) == [["d", "p", "q"], ["d", "p", "q"]]


def test_44794_a_prompt_that_was_begun_is_not_suspended_for_younger_ones() -> None:
    scheduler = make(400, block_size=16, max_batch_tokens=256, max_chunk=64, inter_prefill_budget=64)
    model, run = FakeModel(scheduler.config), Run()
    scheduler.add(Request("first", prompt(640), 1))
    for i in range(8):
        scheduler.add(Request(f"y{i}", prompt(50, i + 1), 1))
    for number in range(1, 11):
        plan = step(scheduler, model, run)
        assert plan.entries[0].id == "first" and plan.entries[0].context == 64 * number
    assert run.reasons["first"] is FinishReason.LENGTH


def test_decodes_are_never_starved_by_prompts() -> None:
    scheduler = make(400, block_size=16, max_batch_tokens=32, max_seqs=8)
    model, run = FakeModel(scheduler.config), Run()
    for i in range(4):
        scheduler.add(Request(f"d{i}", prompt(4, i), 40))
    step(scheduler, model, run)
    for i in range(4):
        scheduler.add(Request(f"p{i}", prompt(200, 9 + i), 1))
    for _ in range(20):
        plan = step(scheduler, model, run)
        assert {f"d{i}" for i in range(4)} <= {entry.id for entry in plan.entries}
        assert plan.num_tokens == 32


def test_33125_hashed_prefix_survives_unhashed_traffic() -> None:
    scheduler = make(20, block_size=4)
    model = FakeModel(scheduler.config)
    run_all(scheduler, [Request("a", prompt(17), 1)], model)
    for i in range(30):
        run_all(scheduler, [Request(f"t{i}", [i % 5, 3], 1)], model)  # never fills a block
    assert scheduler.cache is not None and len(scheduler.cache) == 4
    request = Request("b", [*prompt(17), 1], 1)
    assert run_all(scheduler, [request], model).outputs["b"] == expected_ids([*prompt(17), 1], 1)
    assert request.cached_tokens == 16


def test_34183_a_finished_request_dies_at_once() -> None:
    scheduler = make(20, block_size=4, max_seqs=2)
    gc.collect()
    gc.disable()
    try:
        request = Request("a", prompt(30), 20)
        dead = weakref.ref(request)
        run_all(scheduler, [request, Request("b", prompt(30, 1), 20)])
        del request
        assert dead() is None
        request = Request("c", prompt(30), 20)
        dead = weakref.ref(request)
        scheduler.add(request)
        scheduler.commit(scheduler.schedule())
        scheduler.abort(["c"])
        del request
        assert dead() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"align_chunks": True, "block_size": 64, "max_batch_tokens": 32, "max_seqs": 4}, "no aligned chunk"),
        ({"align_chunks": True, "block_size": 64, "max_chunk": 63}, "max_chunk >= block_size"),
        ({"max_batch_tokens": 4, "max_seqs": 5}, "one token of every running"),
        ({"num_blocks": 0}, "num_blocks must be at least 1"),
        ({"num_blocks": 1, "block_size": 1}, "no request"),
        ({"max_chunk": 0}, "max_chunk must be at least 1"),
        ({"watermark": 1.0}, "watermark"),
        ({"policy": "lifo"}, "fcfs, priority"),
    ],
)
def test_34445_budgets_that_would_hang_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**{"num_blocks": 100, **options})


def test_34445_block_larger_than_the_budget_works_without_alignment() -> None:
    scheduler = make(4, block_size=64, max_batch_tokens=5, max_seqs=5)
    run = run_all(scheduler, [Request("a", prompt(100), 5), Request("b", prompt(90, 1), 5)])
    assert run.outputs == {"a": expected_ids(prompt(100), 5), "b": expected_ids(prompt(90, 1), 5)}


def test_34046_aligned_chunks_are_cut_alike_on_hit_and_miss() -> None:
    scheduler = make(100, block_size=16, align_chunks=True)
    model, run = FakeModel(scheduler.config), Run()

    def chunks(name: str) -> list[int]:
        scheduler.add(Request(name, prompt(100), 4))
        counts = []
        while scheduler.has_unfinished():
            counts += [entry.count for entry in step(scheduler, model, run).entries]
        return counts

    assert chunks("miss") == [96, 4, 1, 1, 1]
    assert chunks("hit") == [4, 1, 1, 1]
    assert run.outputs["miss"] == run.outputs["hit"] == expected_ids(prompt(100), 4)


def test_35038_drafts_stay_within_the_token_budget() -> None:
    scheduler = make(100, block_size=4, max_batch_tokens=9, max_seqs=4)
    model, run = FakeModel(scheduler.config), Run()
    for i in range(4):
        scheduler.add(Request(str(i), prompt(2, i), 30))
    step(scheduler, model, run)
    while scheduler.has_unfinished():
        for request in scheduler.running:
            scheduler.propose(request.id, expected_ids(request.tokens, 7))
        step(scheduler, model, run)  # the model checks num_tokens <= max_batch_tokens
    assert run.steps < 26
    for i in range(4):
        assert run.outputs[str(i)] == expected_ids(prompt(2, i), 30)


def test_34978_stop_in_the_middle_of_an_accepted_run() -> None:
    ids = expected_ids(prompt(5), 6)
    stop = next(token for i, token in enumerate(ids) if i >= 2 and token not in ids[:i])
    scheduler = make(100, block_size=4)
    model, run = FakeModel(scheduler.config), Run()
    scheduler.add(Request("a", prompt(5), 50, stop_ids=[stop]))
    step(scheduler, model, run)
    scheduler.propose("a", ids[1:6])
    step(scheduler, model, run)
    assert run.outputs["a"] == ids[: ids.index(stop) + 1]
    assert run.reasons["a"] is FinishReason.STOP


def test_49445_queue_cap() -> None:
    scheduler = make(max_queued=2)
    scheduler.add(Request("a", [1], 1))
    scheduler.add(Request("b", [1], 1))
    with pytest.raises(QueueFull, match="'c' refused: 2 requests"):
        scheduler.add(Request("c", [1], 1))
    assert "c" not in scheduler.requests


def test_queue_cap_by_tokens() -> None:
    scheduler = make(400, max_queued_tokens=20, max_seqs=1)
    scheduler.add(Request("long", prompt(50), 2))  # alone in the queue, it may have any length
    with pytest.raises(
        QueueFull, match=r"'b' refused: 50 prompt tokens are waiting, with its 1 more than .*\(20\)"
    ):
        scheduler.add(Request("b", [1], 1))
    model, run = FakeModel(scheduler.config), Run()
    step(scheduler, model, run)
    scheduler.add(Request("c", prompt(12), 1), held=True)
    scheduler.add(Request("d", prompt(8), 1))
    with pytest.raises(QueueFull, match="20 prompt tokens"):
        scheduler.add(Request("e", [1], 1))
    scheduler.abort(["c"])
    scheduler.add(Request("e", prompt(12), 1))
    while scheduler.has_unfinished():
        step(scheduler, model, run)
    assert scheduler.queued_tokens == 0 and set(run.reasons) == {"long", "d", "e"}


def test_a_preempted_request_is_held_and_takes_its_place_again() -> None:
    scheduler = make(10, block_size=4, max_seqs=2, max_batch_tokens=64)
    model, run = FakeModel(scheduler.config), Run()
    for name in "ab":
        scheduler.add(Request(name, prompt(12, ord(name)), 20))
    for _ in range(12):
        step(scheduler, model, run)
    [preempted] = scheduler.waiting
    scheduler.add(Request("c", prompt(4), 1))
    queued = scheduler.queued_tokens
    scheduler.hold(preempted.id)
    assert scheduler.waiting[0].id == "c" and scheduler.queued_tokens == queued
    scheduler.abort(["c", *(request.id for request in scheduler.running)])
    scheduler.pause(Pause.NEW)
    assert scheduler.has_started() and not scheduler.schedule().entries
    scheduler.add(Request("d", prompt(4), 1))
    scheduler.resume(preempted.id)
    assert [request.id for request in scheduler.waiting] == [preempted.id, "d"]
    scheduler.pause(None)
    while scheduler.has_unfinished():
        step(scheduler, model, run)
    assert {preempted.id, "d"} <= set(run.reasons)
    with pytest.raises(KeyError):
        scheduler.hold("a")


def priority_order(span: int | None) -> list[str]:
    """Queues four requests of low priority, then a stream of urgent ones; one runs at a time. Returns the
    order of admission."""
    scheduler = make(400, max_seqs=1, max_batch_tokens=64, policy="priority", priority_span=span)
    model, run = FakeModel(scheduler.config), Run()
    order: list[str] = []
    for i in range(4):
        scheduler.add(Request(f"late{i}", prompt(4, i), 1, priority=2))
    for i in range(40):
        scheduler.add(Request(f"urgent{i}", prompt(4, i), 1, priority=0))
        order += step(scheduler, model, run).admitted
    return order


def test_priority_goes_first_and_nobody_starves() -> None:
    order = priority_order(span=5)
    # late0 arrived as number 0, two levels lower: only the urgent arrivals 4 to 9 precede it.
    assert order[:7] == [*(f"urgent{i}" for i in range(6)), "late0"]
    assert [name for name in order if name.startswith("late")] == ["late0", "late1", "late2", "late3"]
    assert not any(name.startswith("late") for name in priority_order(span=None))


def test_34125_pause_lets_what_has_started_end() -> None:
    """A preempted request counts as started, although it waits."""
    scheduler = make(8, block_size=4, max_seqs=3, max_batch_tokens=64)
    model, run = FakeModel(scheduler.config), Run()
    for name, length in (("a", 12), ("b", 12), ("c", 20)):
        scheduler.add(Request(name, prompt(length, ord(name)), 14))
    while not run.preemptions:
        step(scheduler, model, run)
    assert [r.id for r in scheduler.waiting] == ["b", "c"]
    scheduler.pause(Pause.NEW)
    while scheduler.has_started():
        assert "c" not in step(scheduler, model, run).admitted
    assert set(run.reasons) == {"a", "b"} and [r.id for r in scheduler.waiting] == ["c"]
    assert step(scheduler, model, run).entries == []
    scheduler.pause(None)
    while scheduler.has_unfinished():
        step(scheduler, model, run)
    assert run.outputs["c"] == expected_ids(prompt(20, ord("c")), 12)


def test_34125_pause_keeps_everything_where_it_is() -> None:
    scheduler = make(50, block_size=4)
    model, run = FakeModel(scheduler.config), Run()
    scheduler.add(Request("a", prompt(9), 6))
    step(scheduler, model, run)
    scheduler.pause(Pause.ALL)
    before = [snapshot_of_request(r) for r in scheduler.requests.values()]
    for _ in range(5):
        assert step(scheduler, model, run).entries == []
    assert [snapshot_of_request(r) for r in scheduler.requests.values()] == before
    scheduler.pause(None)
    while scheduler.has_unfinished():
        step(scheduler, model, run)
    assert run.outputs["a"] == expected_ids(prompt(9), 6)


def test_34125_abort_returns_what_it_ended() -> None:
    scheduler = make(8, block_size=4, max_seqs=1)
    for name in "abc":
        scheduler.add(Request(name, prompt(9), 5), held=name == "c")
    plan = scheduler.schedule()
    scheduler.commit(plan)
    ended = scheduler.abort(["a", "nobody", "c", "b", "a"])
    assert [(output.id, output.finish_reason) for output in ended] == [(n, FinishReason.ABORT) for n in "acb"]
    assert scheduler.update(plan, [3]) == []  # the step was in progress: its result is dropped
    assert not scheduler.has_unfinished()
    scheduler.check()
    assert scheduler.pool.num_referenced == 0


def test_an_empty_step_with_work_left_is_an_error_with_a_dump(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make(8, block_size=4, max_seqs=1)
    scheduler.add(Request("a", prompt(9), 5))
    monkeypatch.setattr(StepBuilder, "_chunk", lambda self, start, known: 0)
    with pytest.raises(SchedulerStuck, match=r"(?s)free.*waiting: 1.*'a'"):
        scheduler.schedule()


def test_preemption_finds_its_own_blocks_again() -> None:
    """The computed blocks of a preempted request stay cached: they are not computed again if no other request
    took them."""
    scheduler = make(8, block_size=4, max_seqs=2)
    requests = [Request("a", prompt(12), 14), Request("b", prompt(12, 1), 14)]
    run = run_all(scheduler, requests)
    assert run.preemptions > 0
    # The younger request is preempted.
    assert requests[1].preemptions == run.preemptions and requests[0].preemptions == 0
    assert requests[1].cached_tokens == 0  # blocks that it computed itself are no cache hits of the prompt
    assert run.outputs == {"a": expected_ids(prompt(12), 14), "b": expected_ids(prompt(12, 1), 14)}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("a", [], 5), ValueError, "prompt is empty"),
        (("a", [1, -2], 5), ValueError, "-2"),
        (("a", [1, "x"], 5), TypeError, "ints, got 'x'"),
        (("a", [1, True], 5), TypeError, "ints, got True"),
        (("a", [1], 0), ValueError, "max_tokens must be at least 1"),
        (("a", [1], 2.0), TypeError, "max_tokens must be an int"),
        (("a", [1], 2, (), 0, []), TypeError, "unhashable"),
    ],
)
def test_bad_requests(arguments: tuple[object, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Request(*arguments)


def test_ids_are_unique_while_in_use() -> None:
    scheduler = make()
    request = Request("a", [1], 1)
    scheduler.add(request)
    with pytest.raises(ValueError, match="in use"):
        scheduler.add(Request("a", [1], 1))
    run_all(scheduler, [])
    with pytest.raises(ValueError, match="make a new"):
        scheduler.add(request)
    run_all(scheduler, [Request("a", [1], 1)])
    with pytest.raises(ValueError, match="not held"):
        scheduler.resume("a")
    with pytest.raises(ValueError, match="no such"):
        scheduler.propose("a", [1])


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prefix_that_is_being_computed_is_waited_for(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that arrive together compute a common prefix once; short ones are not waited for, nor what an aborted request began."""

    def computed(shared: int, abort: bool = False) -> int:
        scheduler = make(400, block_size=16, max_seqs=8, max_batch_tokens=2048)
        model, run, tokens = FakeModel(scheduler.config), Run(), 0
        requests = [Request(str(i), prompt(shared) + prompt(40, i + 1), 3) for i in range(4)]
        for request in requests:
            scheduler.add(request)
        while scheduler.has_unfinished():
            while len(run.in_flight) < depth:
                plan = launch(scheduler, model, run)
                tokens += sum(entry.count for entry in plan.entries)
                if not plan.entries:
                    break
            if abort:
                scheduler.abort("0")
                abort = False
            take(scheduler, run)
        assert all(run.outputs[r.id] == expected_ids(r.tokens[: r.prompt_len], 3) for r in requests[1:])
        return tokens

    outputs = 4 * 2
    assert computed(608) <= 608 + 4 * 40 + outputs
    assert computed(608, abort=True) <= 2 * 608 + 4 * 40 + outputs
    assert computed(64) == 4 * (64 + 40) + outputs
    monkeypatch.setattr(step_builder, "SHARED_TOKENS", 10_000)
    assert computed(608) > 2 * 608 + 4 * 40 + outputs
