"""The minutes of tuning: every problem has its share, on a clock that only the work of candidates moves. 14 workers compile; one GPU measures."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import pytest

from gristmill.autotune import tune as tuning
from gristmill.autotune.options import Job, Option
from gristmill.autotune.place import Place, place
from gristmill.autotune.verifying import chunks, key_of
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store, Timing, Verification, target_key

OP = default_registry().op("moe")
PROBLEMS = [
    f"m={m},{layer}"
    for layer in ("top_k=8,e=128,h=2048,i=768", "top_k=2,e=8,h=4096,i=7168", "top_k=8,e=64,h=7168,i=1024")
    for m in (1, 16, 64)
]
COMPILING, CHECKING, PREPARING, SAMPLE = 8.0, 0.5, 0.25, 0.01
"""Seconds of a program, of a verification, of a candidate before it is timed, and of a sample."""
WORKERS = 14


class Machine:
    """The clock, the programs that are compiled, and what was measured when."""

    def __init__(self) -> None:
        self.time, self.programs = 0.0, set[str]()
        self.compiled = self.found_missing = 0
        self.ends: list[float] = []

    def now(self) -> float:
        return self.time

    def compile(self, option: Option) -> float:
        """Seconds to make the programs of a candidate, of each product by itself; those that are there take none."""
        parts = {f"{option.kernel.name} {n} {value}" for n, value in option.config.items()}
        new = parts - self.programs
        self.programs |= parts
        self.compiled += len(new)
        return COMPILING * len(new)

    def verify_all(
        self,
        pairs: Sequence[tuple[Job, Option]],
        here: Place,
        pool: Sequence[object],
        deadline: float,
        end: float,
    ) -> list[Verification]:
        """As `verifying.verify_all`, where each worker has a clock of its own."""
        free, records = [self.time] * len(pool), []
        for chunk in chunks(pairs, len(pool)):
            at = heapq.heappop(free)
            for job, option, small in chunk:
                if (at > deadline and not option.default) or (at > end and records):
                    continue
                at += self.compile(option) + CHECKING
                op, problem, kernel, config = key_of(job, option)
                assert problem == str(small)
                fields = {"target": target_key(here.target), "toolchain": here.build.key(), "code": ""}
                records.append(
                    Verification(op=op, kernel=kernel, config=config, problem=problem, ok=True, **fields)
                )
            heapq.heappush(free, at)
        self.time = max(free)
        return records

    def prepared(
        self, job: Job, choices: Sequence[Option], device: str, wrong: list[str], deadline: float
    ) -> list[Measured]:
        made: list[Measured] = []
        for option in choices:
            if made and self.time > deadline:
                break
            self.found_missing += self.compile(option) > 0
            self.time += PREPARING
            made.append(Measured(self, option))
        return made


class Measured:
    """A candidate; the further its place is from 5, the longer it takes."""

    timing = "graph,cold"

    def __init__(self, machine: Machine, option: Option) -> None:
        self.machine, self.kernel, self.config, self.name = (
            machine,
            option.kernel,
            option.config,
            option.name,
        )

    def sample(self) -> float:
        self.machine.time += SAMPLE
        return 100.0 + abs(int(self.config["first"]) - 5) + (self.kernel.name != "moe_chain_triton")

    def conclude(self) -> None:
        self.machine.ends.append(self.machine.time)


def choices(job: Job, here: Place) -> list[Option]:
    """Two kernels with 24 configurations each, of which problems have half in common."""
    shift = 12 * (PROBLEMS.index(str(job.problem)) % 2)
    kernels = [default_registry().kernel("moe", name) for name in ("moe_chain_triton", "moe_cutedsl_sm90")]
    return [Option(kernel, {"first": n + shift}, n == 0) for kernel in kernels for n in range(24)]


def run(
    monkeypatch: pytest.MonkeyPatch, seconds: float, workers: int = WORKERS
) -> tuple[Machine, list[tuning.Tuned], list[list[object]]]:
    machine, saved = Machine(), []
    monkeypatch.setattr(tuning, "now", machine.now)
    monkeypatch.setattr(tuning, "options", choices)
    monkeypatch.setattr(tuning, "verify_all", machine.verify_all)
    monkeypatch.setattr(tuning, "prepared", machine.prepared)
    jobs = [Job(OP, OP.problem(text)) for text in PROBLEMS]

    def save(records: list[object]) -> Store:
        saved.append(records)
        return Store()

    tuned = tuning.tune(jobs, place("cpu"), save, seconds=seconds, store=Store(), workers=workers)
    return machine, tuned, saved


def test_five_minutes_try_every_candidate_of_nine_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, tuned, saved = run(monkeypatch, 300)
    assert [one.state for one in tuned] == ["tuned"] * 9 and machine.time < 300
    assert [(one.options, one.untried) for one in tuned] == [(48, 0)] * 9
    assert {(one.kernel, one.config["first"]) for one in tuned if one.config} == {
        ("moe_chain_triton", 5),
        ("moe_chain_triton", 12),
    }
    assert machine.compiled == 2 * 36, "problems that share a program compile it once"
    assert not machine.found_missing, "nothing is compiled while the GPU measures"
    assert all(any(isinstance(record, Timing) for record in records) for records in saved)


@pytest.mark.parametrize("seconds", [90, 150])
def test_short_time_is_shared_evenly_and_what_was_cut_is_counted(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    machine, tuned, _ = run(monkeypatch, seconds)
    assert [one.state for one in tuned] == ["tuned"] * 9 and machine.time < 1.1 * seconds
    assert all(0 < one.untried < 46 for one in tuned) or seconds > 90
    took = [one.seconds for one in tuned]
    assert max(took) < 2 * min(took), took
    assert max(one.untried for one in tuned) - min(one.untried for one in tuned) <= 12


def test_one_worker_still_leaves_time_for_every_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, tuned, _ = run(monkeypatch, 120, workers=1)
    assert [one.state for one in tuned] == ["tuned"] * 9 and machine.time < 1.1 * 120
    assert all(one.us is not None and one.untried for one in tuned)


def test_problems_past_the_end_are_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    _, tuned, saved = run(monkeypatch, 6)
    states = [one.state for one in tuned]
    assert states == sorted(states, key=lambda state: state != "tuned") and "out of time" in states
    assert len(saved) == states.count("tuned")
