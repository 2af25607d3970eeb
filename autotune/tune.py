"""Tuning: find the fastest verified kernel and configuration of each problem, within a time budget, and store it."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gristmill.autotune.clock import now
from gristmill.autotune.gpu_clock import sm_clock
from gristmill.autotune.halving import halve
from gristmill.autotune.options import Job, Option, options
from gristmill.autotune.place import Place
from gristmill.autotune.verifying import verify_all
from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store, Timing, Verification, config_key, target_key
from gristmill.kernel_registry.times import deployed, of_present_code

if TYPE_CHECKING:
    from gristmill.autotune.candidate import Candidate


@dataclass
class Tuned:
    """The outcome of one job.

    Attributes:
        reason: why no kernel ran.
        default_us: the time of the fastest kernel in its default configuration, in the same final.
    """

    op: str
    problem: str
    weight: float
    state: str
    options: int = 0
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
    """Tune `jobs` in order until `seconds` are over. `save` gets the records of each job when it is done, so an
    interrupted run resumes: jobs with times in the store are skipped.
    """
    from gristmill.autotune.worker import Worker

    end, results = now() + seconds, []
    pool = [Worker() for _ in range(workers)]
    try:
        for number, job in enumerate(jobs):
            if not redo and known(job, here, store):
                results.append(Tuned(job.op.name, str(job.problem), job.weight, "known"))
                continue
            left = end - now()
            # Jobs that cannot end in time are not started: the quickest job so far is the estimate of the least duration.
            if left <= min((one.seconds for one in results if one.state == "tuned"), default=0.0):
                results.append(Tuned(job.op.name, str(job.problem), job.weight, "out of time"))
                continue
            waiting = sum(redo or not known(j, here, store) for j in jobs[number:])
            progress(
                f"{number + 1}/{len(jobs)} {job.op.name} {job.problem}: {left / 60:.1f} minutes left for {waiting} problem(s)"
            )
            # Time left over by quick jobs goes to later ones; no job may take more than half of the remaining time.
            share = min(max(4 * left / waiting, 2.0), max(left / 2, left / waiting))
            tuned, records = _one(job, here, now() + share, pool)
            results.append(tuned)
            store = save(records)
    finally:
        for worker in pool:
            worker.close()
    return results


def _one(job: Job, here: Place, deadline: float, pool: Sequence[Any]) -> tuple[Tuned, list[Any]]:
    from gristmill.autotune.candidate import WrongResultError
    from gristmill.autotune.errors import UnverifiableError

    begin, device = now(), here.device or "cpu"
    tuned = Tuned(job.op.name, str(job.problem), job.weight, "tuned")
    choices = options(job, here)
    tuned.options = len(choices)
    records: list[Any] = [*verify_all([(job, option) for option in choices], here, pool, deadline)]
    verdicts = {(r.kernel, r.config): r for r in records}
    fit = []
    for option in choices:
        record = verdicts.get((option.kernel.name, config_key(option.config)))
        if record is not None and record.ok:
            fit.append(option)
        elif record is not None:
            tuned.wrong.append(f"{option.name}: {record.reason}")
    try:
        candidates = prepared(job, fit, device, tuned.wrong, deadline)
    except UnverifiableError as error:
        tuned.reason, candidates = str(error), []
    by_name = {option.name: option for option in fit}
    defaults = [one for one in candidates if by_name[one.name].default]
    placed = []
    for one in halve(
        candidates,
        keep=sorted(defaults, key=lambda one: one.sample())[:1],
        deadline=deadline,
        mhz=sm_clock(device),
        kind=lambda one: one.kernel.name,
    ):
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
    return tuned, records


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
