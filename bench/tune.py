"""Tuning: find the fastest verified kernel and configuration of each problem, within a time budget, and store it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gristmill.autotune.clock import now
from gristmill.autotune.gpu_clock import sm_clock
from gristmill.autotune.place import Place
from gristmill.bench.halving import halve
from gristmill.bench.options import Job, options
from gristmill.bench.shapes import Call
from gristmill.bench.verifying import verify_all
from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store, Timing, Verification, config_key, target_key
from gristmill.kernel_registry.times import of_present_code


@dataclass
class Tuned:
    """The outcome of one job. reason: why no kernel ran. default_us: of the fastest kernel in its default configuration, in the same final."""

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


def jobs_of(calls: Iterable[Call]) -> list[Job]:
    """One job per problem, weighted by its number of calls in the model; those that move most data first."""
    weights: dict[tuple[str, str], float] = {}
    for call in calls:
        weights[call.op, call.problem] = weights.get((call.op, call.problem), 0.0) + call.weight
    registry = default_registry()
    jobs = [
        Job(registry.op(op), registry.op(op).problem(problem), weight)
        for (op, problem), weight in weights.items()
    ]
    return sorted(jobs, key=lambda job: -job.weight * _size(job))


def sampled(jobs: Iterable[Job]) -> float:
    """Tokens that the calls of `jobs` generate, weighted: the draws of the operation `sample`, 0 if it is not among them."""
    return sum(job.weight * job.problem.integer("m") for job in jobs if job.op.name == "sample")


def _size(job: Job) -> float:
    cost = job.op.cost(job.problem)
    return cost.bytes + cost.flops / 150  # a device does some hundred operations per byte


def known(job: Job, here: Place, store: Store) -> bool:
    """Whether the problem is tuned: the store has times of it with the present toolchain in the timing mode of deployment,
    and none is of code that has changed since."""
    own = [
        t
        for t in store.times(job.op.name, target_key(here.target))
        if t.problem == str(job.problem)
        and t.toolchain == here.build.key()
        and not {"hot", "isolated"} & {*t.timing.split(",")}
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
    from gristmill.autotune.errors import UnverifiableError
    from gristmill.bench.arms import KernelArm, WrongResultError, shared_rotations

    begin, device = now(), here.device or "cpu"
    tuned = Tuned(job.op.name, str(job.problem), job.weight, "tuned")
    candidates = options(job, here)
    tuned.options = len(candidates)
    records: list[Any] = [*verify_all([(job, option) for option in candidates], here, pool, deadline)]
    verdicts = {(r.kernel, r.config): r for r in records}
    fit = []
    for option in candidates:
        record = verdicts.get((option.kernel.name, config_key(option.config)))
        if record is not None and record.ok:
            fit.append(option)
        elif record is not None:
            tuned.wrong.append(f"{option.name}: {record.reason}")
    gc.collect()  # arms of the last problem hold argument lists and graphs in reference cycles
    try:
        rotations = shared_rotations(job.op, job.problem, device, [o.kernel for o in fit])
    except UnverifiableError as error:
        tuned.reason, fit = str(error), []
    arms: list[KernelArm] = []
    for option in fit:
        if arms and now() > deadline:
            break
        try:
            arms.append(
                KernelArm(
                    option.kernel,
                    option.config,
                    rotations[option.kernel.name],
                    name=option.name,
                    audited=False,
                )
            )
        except WrongResultError as error:
            tuned.wrong.append(f"{option.name}: {error}")
    by_name = {option.name: option for option in fit}
    defaults = [arm for arm in arms if by_name[arm.name].default]
    best_default = sorted(defaults, key=lambda arm: arm.sample())[:1]
    placed = []
    for one in halve(
        arms,
        keep=best_default,
        deadline=deadline,
        mhz=sm_clock(device),
        kind=lambda arm: by_name[arm.name].kernel.name,
    ):
        try:
            one.arm.conclude()
            placed.append(one)
        except WrongResultError as error:
            tuned.wrong.append(f"{one.arm.name}: {error}")
    where = {"target": target_key(here.target), "toolchain": here.build.key()}
    for one in placed:
        option = by_name[one.arm.name]
        records.append(
            Timing(
                op=job.op.name,
                kernel=option.kernel.name,
                code=option.kernel.code_hash(option.config, built=True),
                config=dict(option.config),
                problem=str(job.problem),
                us=one.us,
                samples=one.samples,
                timing=one.arm.timing,
                **where,
            )
        )
    if placed:
        winner = by_name[placed[0].arm.name]
        tuned.kernel, tuned.config, tuned.us = winner.kernel.name, winner.config, placed[0].us
        tuned.default_us = min((one.us for one in placed if by_name[one.arm.name].default), default=None)
    else:
        tuned.state, tuned.reason = (
            "nothing ran",
            tuned.reason or "; ".join(tuned.wrong) or "no kernel can run it here",
        )
    tuned.seconds = now() - begin
    return tuned, records
