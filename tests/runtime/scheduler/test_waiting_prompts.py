"""A prompt that waits for blocks: what the last try to admit it has found holds, or is found out again."""

from __future__ import annotations

import pytest

from gristmill.runtime.kv_cache import PrefixCache
from gristmill.runtime.scheduler import Request, Scheduler, SchedulerConfig

from .harness import FakeModel, Run, run_all, step


def make(num_blocks: int, watermark: float = 0.0, **options: int) -> Scheduler:
    config = SchedulerConfig(num_blocks=num_blocks, block_size=4, max_seqs=4, watermark=watermark, **options)
    return Scheduler(config)


def prompt(length: int, *rest: int) -> list[int]:
    return [(7 * i) % 41 for i in range(length)] + list(rest)


def is_admitted_beside(scheduler: Scheduler) -> bool:
    """Whether "waiting" is admitted before "running", with the same prefix, has ended."""
    model, run = FakeModel(scheduler.config), Run()
    scheduler.add(Request("running", prompt(32, 1), 8))
    scheduler.add(Request("waiting", prompt(32, 2), 2))
    waiting = scheduler.requests["waiting"]
    step(scheduler, model, run)
    assert waiting.refusal is not None and waiting.refusal[:2] == (0, 9) and not waiting.started
    while not waiting.started:
        step(scheduler, model, run)
    return "running" in scheduler.requests


def test_others_compute_what_it_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_admitted_beside(make(12, max_batch_tokens=64, max_chunk=8))
    monkeypatch.setattr(PrefixCache, "__contains__", lambda cache, hash_: False)
    assert not is_admitted_beside(make(12, max_batch_tokens=64, max_chunk=8)), "planted"


def test_others_get_blocks_that_it_shares() -> None:
    scheduler = make(12, max_batch_tokens=64)
    model, run = FakeModel(scheduler.config), Run()
    run_all(scheduler, [Request("before", prompt(16, 1), 1)], model)
    scheduler.add(Request("running", [40 - i for i in range(20)], 4))
    step(scheduler, model, run)
    waiting = Request("waiting", prompt(16, *range(17)), 2)
    scheduler.add(waiting)
    step(scheduler, model, run)
    assert waiting.refusal is not None and waiting.refusal[:2] == (4, 9)
    scheduler.add(Request("between", prompt(16, 3), 2))
    step(scheduler, model, run)
    assert scheduler.requests["between"].started
    step(scheduler, model, run)
    assert waiting.refusal[:2] == (4, 5)
    while scheduler.has_unfinished():
        step(scheduler, model, run)
    assert len(run.outputs["waiting"]) == 2


@pytest.mark.parametrize(
    ("length", "num_blocks", "watermark"), [(33, 12, 0.0), pytest.param(32, 15, 0.3, id="all of it is there")]
)
def test_a_prompt_that_waits_is_looked_up_once(
    length: int, num_blocks: int, watermark: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookups: list[int] = []
    match = PrefixCache.match

    def counted(cache: PrefixCache, hashes: list[int], tokens: list[int], *rest: object) -> object:
        lookups.append(len(tokens))
        return match(cache, hashes, tokens, *rest)

    scheduler = make(num_blocks, max_batch_tokens=64, watermark=watermark)
    model, run = FakeModel(scheduler.config), Run()
    run_all(scheduler, [Request("before", prompt(length), 1)], model)
    monkeypatch.setattr(PrefixCache, "match", counted)
    scheduler.add(Request("running", [40 - i for i in range(16)], 10))
    scheduler.add(Request("waiting", prompt(length), 2))
    while scheduler.has_unfinished():
        step(scheduler, model, run)
    assert lookups.count(length) == 2, "at the first try, and when it is admitted"
