"""Tuning: find the fastest verified kernel and configuration of each problem, within a time budget, and store it."""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gristmill.autotune.clock import now
from gristmill.autotune.gpu_clock import sm_clock
from gristmill.autotune.halving import halve
from gristmill.autotune.options import Job, Option, options
from gristmill.autotune.place import Place
from gristmill.autotune.verifying import BURST, key_of, verify_all
from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store, Timing, Verification, target_key
from gristmill.kernel_registry.times import deployed, of_present_code

if TYPE_CHECKING:
    from gristmill.autotune.candidate import Candidate


@dataclass
class Tuned:
    """The outcome of one job.

    Attributes:
        options: candidates. untried: those that were not verified or not timed, for want of time.
        reason: why no kernel ran.
        default_us: the time of the fastest kernel in its default configuration, in the same final.
    """

    op: str
    problem: str
    weight: float
    state: str
    options: int = 0
    untried: int = 0
    wrong: list[str] = field(default_factory=list)
    kernel: str | None = None
    config: Config | None = None
    us: float | None = None
    default_us: float | None = None
    seconds: float = 0.0
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The row of JSON and result files."""
        gain = None if self.us is None or self.default_us is None else self.default_us / self.us
        saved = (
            None if self.us is None or self.default_us is None else self.weight * (self.default_us - self.us)
        )
        return vars(self) | {
            "config": dict(self.config) if self.config is not None else None,
            "gain": gain,
            "saved_us": saved,
        }


def known(job: Job, here: Place, store: Store) -> bool:
    """Whether the problem is tuned: the store has times of it with the present toolchain in the timing mode of deployment,
    and none is of code that has changed since."""
    own = [
        t
        for t in store.times(job.op.name, target_key(here.target))
        if t.problem == str(job.problem) and t.toolchain == here.build.key() and deployed(t)
    ]
    return bool(own) and not any(_outdated(t) for t in own)


def _outdated(timing: Timing) -> bool:
    """Whether it was measured with other code than its kernel has now. False for kernels that no longer exist."""
    kernel = next((k for k in default_registry().kernels_of(timing.op) if k.name == timing.kernel), None)
    return kernel is not None and not of_present_code(kernel, timing)


def with_tuned(store: Store, records: Iterable[Verification | Timing]) -> Store:
    """`store` with the `records` of tuning, without the times that other code took for their problems."""
    records, made = [*records], Store()
    tuned = {_place(record) for record in records if isinstance(record, Timing)}
    for record in (
        *store.verifications.values(),
        *(t for t in store.timings if _place(t) not in tuned or not _outdated(t)),
        *records,
    ):
        made.add(record)
    return made


def _place(timing: Timing) -> tuple[str, ...]:
    return timing.op, timing.problem, timing.target, timing.toolchain


def tune(
    jobs: Sequence[Job],
    here: Place,
    save: Callable[[list[Any]], Store],
    *,
    seconds: float,
    store: Store,
    redo: bool = False,
    workers: int = 2,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Tuned]:
    """Tune `jobs` in order until `seconds` are over, each in an even share of what is left of them.

    All workers compile and verify the candidates of a burst of jobs, for half of its share at most, before the first of them is timed on the
    idle machine: programs that jobs share are compiled once, and no job waits for a compiler. `save` gets the records of each job when it is
    done, so an interrupted run resumes: jobs with times in the store are skipped.
    """
    from gristmill.autotune.worker import Worker

    end, results = (
        now() + seconds,
        [Tuned(job.op.name, str(job.problem), job.weight, "known") for job in jobs],
    )
    waiting = [n for n, job in enumerate(jobs) if redo or not known(job, here, store)]
    pool, least = [Worker() for _ in range(workers)], -math.inf
    try:
        while waiting:
            left, burst = end - now(), waiting[:BURST]
            choices = {n: options(jobs[n], here) for n in burst if left > least}
            progress(
                f"{len(waiting)} of {len(jobs)} problem(s) left, {left / 60:.1f} minutes: "
                f"verifying {sum(map(len, choices.values()))} candidates of {len(choices)}"
            )
            deadline = now() + left * len(burst) / len(waiting) / 2
            verified = verify_all(_in_turns(jobs, choices), here, pool, deadline, end) if choices else []
            verdicts = {(r.op, r.problem, r.kernel, r.config): r for r in verified}
            for n in burst:
                job, left = jobs[n], end - now()
                # Jobs that cannot end in time are not started: the quickest job so far is the estimate of the least duration. The first one is.
                if n not in choices or left <= least:
                    results[n].state = "out of time"
                    continue
                progress(
                    f"{n + 1}/{len(jobs)} {job.op.name} {job.problem}: {left / 60:.1f} minutes left for {len(waiting)} problem(s)"
                )
                results[n], records, needed = _one(
                    job, choices[n], verdicts, here, now() + left / len(waiting)
                )
                waiting = [other for other in waiting if other != n]
                least = needed if least < 0 else min(least, needed)
                save(records)
            waiting = [n for n in waiting if n not in burst]
    finally:
        for worker in pool:
            worker.close()
    return results


def _in_turns(jobs: Sequence[Job], choices: Mapping[int, Sequence[Option]]) -> list[tuple[Job, Option]]:
    """The candidates of several jobs for `verify_all`: the first ones of every kernel and job before any second one."""
    turns = [(rank, n, option) for n, own in choices.items() for rank, option in _ranked(own)]
    return [(jobs[n], option) for rank, n, option in sorted(turns, key=lambda turn: turn[:2])]


def _ranked(choices: Sequence[Option]) -> list[tuple[int, Option]]:
    """Each candidate with its place among those of its kernel, whose space has the most promising ones first; all first ones first."""
    places: Counter[str] = Counter()
    ranked = []
    for option in choices:
        ranked.append((places[option.kernel.name], option))
        places[option.kernel.name] += 1
    return sorted(ranked, key=lambda one: one[0])


def _one(
    job: Job,
    choices: Sequence[Option],
    verdicts: Mapping[tuple[str, str, str, str], Verification],
    here: Place,
    deadline: float,
) -> tuple[Tuned, list[Any], float]:
    """The outcome of a job, its records, and the least seconds that it could have taken. verdicts: by `key_of`."""
    from gristmill.autotune.candidate import WrongResultError
    from gristmill.autotune.errors import UnverifiableError

    begin, device = now(), here.device or "cpu"
    tuned = Tuned(job.op.name, str(job.problem), job.weight, "tuned")
    tuned.options = len(choices)
    records: list[Any] = []
    fit = []
    for _, option in _ranked(choices):
        record = verdicts.get(key_of(job, option))
        if record is not None:
            records.append(record)
        if record is not None and record.ok:
            fit.append(option)
        elif record is not None:
            tuned.wrong.append(f"{option.name}: {record.reason}")
    tuned.untried = len(choices) - len(records)
    failed = len(tuned.wrong)
    try:
        candidates = prepared(job, fit, device, tuned.wrong, (begin + deadline) / 2)
        tuned.untried += len(fit) - len(candidates) - (len(tuned.wrong) - failed)
    except UnverifiableError as error:
        tuned.reason, candidates = str(error), []
    by_name = {option.name: option for option in fit}
    defaults = [one for one in candidates if by_name[one.name].default]
    placed, since = [], now()
    finalists = halve(
        candidates,
        keep=sorted(defaults, key=lambda one: one.sample())[:1],
        deadline=deadline,
        clock=now,
        mhz=sm_clock(device),
        kind=lambda one: one.kernel.name,
    )
    halving = now() - since
    for one in finalists:
        try:
            one.candidate.conclude()
            placed.append(one)
        except WrongResultError as error:
            tuned.wrong.append(f"{one.candidate.name}: {error}")
    for one in placed:
        kernel, config = one.candidate.kernel, one.candidate.config
        records.append(
            Timing(
                op=job.op.name,
                kernel=kernel.name,
                code=kernel.code_hash(config, built=True),
                config=config,
                problem=str(job.problem),
                target=target_key(here.target),
                toolchain=here.build.key(),
                us=one.us,
                samples=one.samples,
                timing=one.candidate.timing,
            )
        )
    if placed:
        winner = placed[0].candidate
        tuned.kernel, tuned.config, tuned.us = winner.kernel.name, winner.config, placed[0].us
        tuned.default_us = min(
            (one.us for one in placed if by_name[one.candidate.name].default), default=None
        )
    else:
        tuned.state = "nothing ran"
        tuned.reason = tuned.reason or "; ".join(tuned.wrong) or "no kernel can run it here"
    tuned.seconds = now() - begin
    return tuned, records, tuned.seconds - halving


def prepared(
    job: Job, choices: Sequence[Option], device: str, wrong: list[str], deadline: float = math.inf
) -> list[Candidate]:
    """The verified `choices`, ready to be timed, named by `Option.name`; after `deadline` (`now`) no further one but the first.

    A line for every one that failed is added to `wrong`. UnverifiableError for a problem that is larger than the memory.
    """
    from gristmill.autotune.candidate import Candidate, WrongResultError, shared_rotations

    gc.collect()  # candidates of the last problem hold argument lists and graphs in reference cycles
    rotations = shared_rotations(job.op, job.problem, device, [option.kernel for option in choices])
    candidates: list[Candidate] = []
    for option in choices:
        if candidates and now() > deadline:
            break
        rotation = rotations[option.kernel.name]
        try:
            candidates.append(
                Candidate(option.kernel, option.config, rotation, name=option.name, audited=False)
            )
        except WrongResultError as error:
            wrong.append(f"{option.name}: {error}")
    return candidates
