"""Verifying many candidates: how they are grouped for workers, in which order, and what is done only once."""

from __future__ import annotations

from gristmill.autotune.options import Job, Option, options
from gristmill.autotune.place import place
from gristmill.autotune.verifying import CHUNK, chunks, verify_all
from gristmill.bench.suites import load_suite


class Recorder:
    """A worker that accepts everything and records its tasks."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str]] = []

    def verify(self, op, kernel, config, problem, device):
        self.asked.append((str(problem), kernel.name, str(sorted(config.items()))))
        return {"ok": True, "error": 0.0, "tolerance": 1.0, "reason": "", "judged": True}


def pairs() -> list[tuple[Job, Option]]:
    here = place("h200")
    jobs = [Job(op, problem) for op, problem in load_suite("linear_regret").problems[:12]]
    return [(job, option) for job in jobs for option in options(job, here, every=True)]


def small_of(job: Job, option: Option) -> str:
    return str(job.op.verification(job.problem, option.kernel, option.config))


def test_each_candidate_of_each_cut_out_is_asked_once() -> None:
    expected = {(small_of(job, option), option.name) for job, option in pairs()}
    dealt = [(str(small), option.name) for chunk in chunks(pairs(), 14) for _, option, small in chunk]
    assert len(expected) < len(pairs()) and len(dealt) == len(expected) and set(dealt) == expected


def test_a_chunk_shares_its_arguments_or_its_compilation() -> None:
    for chunk in chunks(pairs(), 14):
        assert len(chunk) <= CHUNK
        compiled = {option.kernel.language == "triton" for _, option, _ in chunk}
        assert len(compiled) == 1
        alike = {option.name if compiled == {True} else str(small) for _, option, small in chunk}
        assert len(alike) == 1


def test_defaults_come_first_and_then_what_is_compiled() -> None:
    kinds = [
        (not option.default, option.kernel.language != "triton")
        for chunk in chunks(pairs(), 4)
        for _, option, _ in chunk
    ]
    assert kinds == sorted(kinds)


def test_few_candidates_are_spread_over_all_workers() -> None:
    job = pairs()[0][0]
    pairs_of_job = [pair for pair in pairs() if pair[0] == job]
    assert len(chunks(pairs_of_job, 14)) >= 14


def test_past_the_deadline_only_defaults_are_verified() -> None:
    pool = [Recorder(), Recorder()]
    records = verify_all(pairs(), place("h200"), pool, deadline=0.0)
    defaults = {(small_of(job, option), option.name) for job, option in pairs() if option.default}
    assert len(records) == len(defaults) == sum(len(worker.asked) for worker in pool)


def test_past_the_end_only_the_first_is_verified() -> None:
    pool = [Recorder()]
    records = verify_all(pairs(), place("h200"), pool, deadline=0.0, end=0.0)
    ((first, *_), *_) = chunks(pairs(), 1)
    assert [record.kernel for record in records] == [first[1].kernel.name] and first[1].default
