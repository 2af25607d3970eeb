"""Tuning: for each problem, which kernel at which configuration is fastest here, verified, into the store, within a budget."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from gristmill.autotune.clock import now
from gristmill.bench.compare import why_not
from gristmill.bench.halving import halve
from gristmill.bench.place import Place
from gristmill.bench.shapes import Call
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store, Timing, Verification, config_key, target_key

MODEL_SLACK = 3.0
"""A kernel whose cost model says this many times the best estimate is not tried."""

MOST = 48
"""Configurations of one kernel at most; a larger space is sampled evenly, its first one included."""


@dataclass(frozen=True)
class Job:
    """One problem to tune, and how often it is called (relatively): what is called most is tuned first."""

    op: Op
    problem: Problem
    weight: float = 1.0


@dataclass(frozen=True)
class Option:
    """A kernel at a configuration. default: the one that would run untuned."""

    kernel: Kernel
    config: Config
    default: bool

    @property
    def name(self) -> str:
        return f"{self.kernel.name}[{config_key(self.config)}]"


@dataclass
class Tuned:
    """The outcome of one job. default_us: of the fastest kernel at its default configuration, in the same final."""

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

    def as_dict(self) -> dict[str, Any]:
        """The row of JSON and result files."""
        gain = None if self.us is None or self.default_us is None else self.default_us / self.us
        saved = None if self.us is None or self.default_us is None else self.weight * (self.default_us - self.us)
        return vars(self) | {"config": dict(self.config) if self.config is not None else None, "gain": gain, "saved_us": saved}


def jobs_of(calls: Iterable[Call]) -> list[Job]:
    """One job a problem, weighted by how often the model calls it; what moves most data first."""
    weights: dict[tuple[str, str], float] = {}
    for call in calls:
        weights[call.op, call.problem] = weights.get((call.op, call.problem), 0.0) + call.weight
    registry = default_registry()
    found = [Job(registry.op(op), registry.op(op).problem(problem), weight) for (op, problem), weight in weights.items()]
    return sorted(found, key=lambda job: -job.weight * _size(job))


def _size(job: Job) -> float:
    cost = job.op.cost(job.problem)
    return cost.bytes + cost.flops / 150  # a device does some hundred operations in the time of a byte


def options(job: Job, here: Place, *, every: bool = False) -> list[Option]:
    """Every kernel and configuration worth trying: those that can run, less what the cost models rule out, large spaces
    sampled. every: all of them."""
    kernels = [k for k in default_registry().kernels_of(job.op.name) if not why_not(k, job.problem, here)]
    kernels = [k for k in kernels if k.auto and not here.policy.excludes(k.name) and not (k.language == "triton" and here.device == "cpu")]
    estimates = {k.name: k.estimate(job.problem, here.target) if k.estimate else None for k in kernels}
    best = min((us for us in estimates.values() if us is not None), default=None)
    found: list[Option] = []
    for kernel in kernels:
        estimate = estimates[kernel.name]
        if not every and best is not None and estimate is not None and estimate > MODEL_SLACK * best:
            continue
        default = dict(kernel.config(job.problem, here.target))
        found.append(Option(kernel, default, True))
        others = [dict(c) for c in kernel.space(job.problem, here.target)] if kernel.space is not None else []
        others = [c for c in others if config_key(c) != config_key(default)]
        step = 1 if every else max(1, -(-len(others) // MOST))
        found += [Option(kernel, config, False) for config in others[::step]]
    return found


def known(job: Job, here: Place, store: Store) -> bool:
    """Whether the store holds a time of this very problem by the present code and toolchain: then it is tuned."""
    registry = default_registry()
    codes = {k.name: k.code_hash() for k in registry.kernels_of(job.op.name)}
    return any(t.problem == str(job.problem) and t.toolchain == here.build.key() and t.code == codes.get(t.kernel)
               for t in store.times(job.op.name, target_key(here.target)))  # fmt: skip


def tune(
    jobs: Sequence[Job], here: Place, save: Callable[[list[Any]], Store], *, seconds: float, store: Store, redo: bool = False,
    workers: int = 2, tell: Callable[[str], None] = lambda text: None,
) -> list[Tuned]:  # fmt: skip
    """Tune `jobs` in order until `seconds` are over. `save` gets the records of each job as soon as it is done, so a run
    that ends early has lost nothing: the next one takes up where it stopped, since jobs the store knows are skipped.
    """
    from gristmill.autotune.worker import Worker

    end, found = now() + seconds, []
    pool = [Worker() for _ in range(workers)]
    try:
        for number, job in enumerate(jobs):
            if not redo and known(job, here, store):
                found.append(Tuned(job.op.name, str(job.problem), job.weight, "known"))
                continue
            left = end - now()
            # What cannot end in time is not begun: the quickest job so far says how long one takes at least.
            if left <= min((one.seconds for one in found if one.state == "tuned"), default=0.0):
                found.append(Tuned(job.op.name, str(job.problem), job.weight, "out of time"))
                continue
            waiting = sum(redo or not known(j, here, store) for j in jobs[number:])
            tell(f"{number + 1}/{len(jobs)} {job.op.name} {job.problem}: {left / 60:.1f} minutes left for {waiting} problem(s)")
            # What is saved by quick jobs goes to later ones; none may take more than half of what is left.
            share = min(max(4 * left / waiting, 2.0), max(left / 2, left / waiting))
            tuned, records = _one(job, here, now() + share, pool)
            found.append(tuned)
            store = save(records)
    finally:
        for worker in pool:
            worker.close()
    return found


def _one(job: Job, here: Place, deadline: float, pool: Sequence[Any]) -> tuple[Tuned, list[Any]]:
    from gristmill.bench.arms import KernelArm, WrongResultError, shared_rotations

    begin, device = now(), here.device or "cpu"
    tuned = Tuned(job.op.name, str(job.problem), job.weight, "tuned")
    candidates = options(job, here)
    tuned.options = len(candidates)
    records: list[Any] = _verify(job, candidates, here, pool, deadline)
    verdicts = {(r.kernel, r.config): r for r in records}
    fit = []
    for option in candidates:
        record = verdicts.get((option.kernel.name, config_key(option.config)))
        if record is not None and record.ok:
            fit.append(option)
        elif record is not None:
            tuned.wrong.append(f"{option.name}: {record.reason}")
    gc.collect()  # arms of the last problem hold argument lists and graphs, in circles
    rotations = shared_rotations(job.op, job.problem, device, [o.kernel for o in fit])
    arms: list[Any] = []
    for option in fit:
        if arms and now() > deadline:
            break
        try:
            arms.append(KernelArm(option.kernel, option.config, rotations[option.kernel.name], name=option.name, audited=False))
        except WrongResultError as error:
            tuned.wrong.append(f"{option.name}: {error}")
    by_name = {option.name: option for option in fit}
    defaults = [arm for arm in arms if by_name[arm.name].default]
    best_default = sorted(defaults, key=lambda arm: arm.sample())[:1]
    placed = []
    for one in halve(arms, keep=best_default, deadline=deadline):
        try:
            one.arm.conclude()  # type: ignore[attr-defined]
            placed.append(one)
        except WrongResultError as error:
            tuned.wrong.append(f"{one.arm.name}: {error}")
    where = {"target": target_key(here.target), "toolchain": here.build.key()}
    for one in placed:
        option = by_name[one.arm.name]
        records.append(Timing(
            op=job.op.name, kernel=option.kernel.name, code=option.kernel.code_hash(), config=dict(option.config),
            problem=str(job.problem), us=one.us, samples=one.samples, timing=one.arm.timing, **where,  # type: ignore[attr-defined]
        ))  # fmt: skip
    if placed:
        winner = by_name[placed[0].arm.name]
        tuned.kernel, tuned.config, tuned.us = winner.kernel.name, winner.config, placed[0].us
        tuned.default_us = min((one.us for one in placed if by_name[one.arm.name].default), default=None)
    else:
        tuned.state = "nothing ran"
    tuned.seconds = now() - begin
    return tuned, records


def _verify(job: Job, candidates: Sequence[Option], here: Place, pool: Sequence[Any], deadline: float) -> list[Verification]:
    """Verify candidates in several child processes at once: that compiles in parallel too. Defaults go first."""
    return verify_all([(job, option) for option in candidates], here, pool, deadline)


def verify_all(pairs: Sequence[tuple[Job, Option]], here: Place, pool: Sequence[Any], deadline: float) -> list[Verification]:
    """A record of every option that was verified, in any order; past `deadline` only defaults still are.

    What several problems have in common, the same cut-out of a weight at the same configuration, is verified once.
    """
    once = {(job.op.name, str(job.op.verification(job.problem)), option.name): (job, option)
            for job, option in sorted(pairs, key=lambda pair: pair[1].default)}  # fmt: skip
    waiting = deque(sorted(once.values(), key=lambda pair: not pair[1].default))

    def work(worker: Any) -> list[Verification]:
        found = []
        while waiting:
            try:
                job, option = waiting.popleft()
            except IndexError:  # another thread had it
                break
            if not option.default and now() > deadline:
                break
            small = job.op.verification(job.problem)
            outcome = worker.verify(job.op, option.kernel, option.config, small, here.device or "cpu")
            if not outcome["judged"]:
                continue
            found.append(Verification(
                op=job.op.name, kernel=option.kernel.name, code=option.kernel.code_hash(), config=config_key(option.config),
                problem=str(small), target=target_key(here.target), toolchain=here.build.key(), ok=outcome["ok"],
                error=outcome["error"], reason=outcome["reason"],
            ))  # fmt: skip
        return found

    with ThreadPoolExecutor(len(pool)) as threads:
        return [record for part in threads.map(work, pool) for record in part]
