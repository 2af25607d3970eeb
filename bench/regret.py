"""What selection loses to exhaustive search: every candidate of every problem timed in one run, and what the store would pick.

For each problem every kernel at every configuration of its space is verified and timed in turn, in `ROUNDS` rounds (one, if
it is `SLOW` times behind; two samples, if `HOPELESS` times); nothing is ruled out by cost models, no space is sampled. Regret is
the time of what selection picks over the least of all, less one.
It is asked of several stores:

- ``store``: the one in use, shipped times included, whatever it knows; by problems that it has times of, and others;
- ``tuned``: one made from the first half of the rounds, as `kernelbench tune` would have written it, judged by the second;
- ``left out``: the same without this problem's records, so that its neighbours must speak for it.

The least of many noisy times is too small by chance, so regrets are, if anything, overstated.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from gristmill.autotune.clock import now
from gristmill.autotune.place import Place
from gristmill.bench.halving import KEEP_WITHIN
from gristmill.bench.options import Job, Option, options
from gristmill.bench.statistics.rounds import Heat
from gristmill.bench.verifying import verify_all
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.select import select
from gristmill.kernel_registry.store import Store, Timing, Verification, config_key, target_key

ROUNDS = 4
"""Rounds, each the least of three samples: half of them tune, half of them judge."""

FINALISTS = 3
"""Candidates of a problem that `tuned` remembers, besides the best default: as many as a tuning's final has."""

SLOW = 2.0
"""A candidate this many times slower than the best of the first round is timed no further."""

HOPELESS = 3.0
"""A candidate whose first two samples are this many times the least first one is not timed again."""

SHOWN = 1.2
"""Candidates within this factor of the best are kept in result files with their samples; of others, the least time."""

BURST = 24
"""Problems that are verified, by all workers, before they are timed, by nobody else at work: enough to keep every worker busy,
few enough that a deadline finds most of what was verified timed too."""


@dataclass
class Studied:
    """One problem. times: of every candidate that ran, by (kernel, configuration): one per round, microseconds.

    exact: the store in use has times of this very problem. missing: candidates that were not tried, for lack of time.
    picks: store -> (kernel, configuration); regrets: store -> what it loses. seconds: that timing took.
    """

    job: Job
    exact: bool
    times: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    defaults: set[tuple[str, str]] = field(default_factory=set)
    configs: dict[tuple[str, str], Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    missing: int = 0
    best: tuple[str, str] | None = None
    picks: dict[str, tuple[str, str]] = field(default_factory=dict)
    regrets: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def tuned_us(self, key: tuple[str, str]) -> float:
        """By the rounds that tune."""
        return min(self.times[key][: ROUNDS // 2])

    def judged_us(self, key: tuple[str, str]) -> float:
        """By the rounds that judge; a candidate far behind has one round for everything."""
        return min(self.times[key][ROUNDS // 2 :] or self.times[key])

    def as_dict(self) -> dict[str, Any]:
        """The row of JSON and result files: the best candidate's time as `us`, and those near it."""
        best_us = None if self.best is None else self.judged_us(self.best)
        picked = set(self.picks.values())
        near = [
            key
            for key in self.times
            if best_us is not None and (key in picked or self.judged_us(key) <= SHOWN * best_us)
        ]
        return {
            "op": self.job.op.name,
            "problem": str(self.job.problem),
            "kernel": self.best[0] if self.best else "",
            "config": self.configs[self.best] if self.best else None,
            "us": best_us,
            "exact": self.exact,
            "candidates": len(self.times),
            "missing": self.missing,
            "wrong": self.wrong,
            "picks": {
                name: {"kernel": k, "config": c, "us": self.judged_us((k, c)), "regret": self.regrets[name]}
                for name, (k, c) in self.picks.items()
            },
            "near": [
                {"kernel": k, "config": c, "samples": self.times[k, c]}
                for k, c in sorted(near, key=self.judged_us)
            ],
            "times": self._table(),
            "seconds": round(self.seconds, 2),
        }

    def _table(self) -> dict[str, dict[str, Any]]:
        """The judged time of every candidate by kernel: the names of a configuration's parts once, then their values."""
        found: dict[str, dict[str, Any]] = {}
        for kernel, config in sorted(self.times, key=self.judged_us):
            names = ",".join(part.partition("=")[0] for part in config.split(","))
            values = ",".join(part.partition("=")[2] for part in config.split(","))
            found.setdefault(kernel, {"of": names, "us": {}})["us"][values] = round(
                self.judged_us((kernel, config)), 3
            )
        return found


def study(
    jobs: Sequence[Job],
    here: Place,
    store: Store,
    *,
    seconds: float,
    workers: int = 2,
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
    each: Callable[[Studied], None] = lambda one: None,
) -> list[Studied]:
    """Study `jobs`, drawn in an order of their own so that what a deadline leaves is a fair sample; then ask the stores.

    each: called with every problem when it has been timed (regrets come at the end, since stores are made of all).
    """
    from gristmill.autotune.worker import Worker

    begin, jobs = now(), list(jobs)
    random.Random(seed).shuffle(jobs)
    pool = [Worker() for _ in range(workers)]
    found: list[Studied] = []
    records: list[Verification] = []
    outcomes: dict[Any, Verification] = {}
    try:
        for first in range(0, len(jobs), BURST):
            burst = jobs[first : first + BURST]
            if now() - begin > seconds:
                break
            candidates = {str(job.problem): _candidates(job, here, store) for job in burst}
            asked = [
                (job, option)
                for job in burst
                for option in candidates[str(job.problem)]
                if _key(job, option) not in outcomes
            ]
            tell(f"{first + 1}/{len(jobs)}: verifying {len(asked)} candidates of {len(burst)} problems")
            made, since = verify_all(asked, here, pool, begin + seconds), now()
            tell(f"{first + 1}/{len(jobs)}: verified {len(made)}; {seconds - now() + begin:.0f} s left")
            records += made
            outcomes |= {(r.op, r.problem, r.kernel, r.config): r for r in made}
            for number, job in enumerate(burst, first + 1):
                if now() - begin > seconds:
                    break
                tell(
                    f"{number}/{len(jobs)} {job.op.name} {job.problem}: {seconds - now() + begin:.0f} s left"
                )
                one = _time(job, candidates[str(job.problem)], outcomes, here, store, random.Random(seed))
                one.seconds, since = now() - since, now()
                found.append(one)
                each(one)
    finally:
        for worker in pool:
            worker.close()
    ask(found, here, store, records)
    return found


def _key(job: Job, option: Option) -> tuple[str, str, str, str]:
    """What a verification is of, as far as problems share it."""
    return job.op.name, str(job.op.verification(job.problem)), option.kernel.name, config_key(option.config)


def _candidates(job: Job, here: Place, store: Store) -> list[Option]:
    """Every option, and what the store would pick if that is another configuration still."""
    found = options(job, here, every=True)
    picked = _pick(job, here, store)
    if picked is not None and all(
        (o.kernel.name, config_key(o.config)) != (picked[0].name, config_key(picked[1])) for o in found
    ):
        found.append(Option(*picked, default=False))
    return found


def _time(
    job: Job,
    candidates: Sequence[Option],
    outcomes: dict[Any, Verification],
    here: Place,
    store: Store,
    chance: random.Random,
) -> Studied:
    from gristmill.bench.arms import KernelArm, WrongResultError, shared_rotations

    own = [t for t in store.times(job.op.name, target_key(here.target)) if t.problem == str(job.problem)]
    one = Studied(job, exact=bool(own))
    fit = []
    for option in candidates:
        record = outcomes.get(_key(job, option))
        if record is None:
            one.missing += 1
        elif record.ok:
            fit.append(option)
        else:
            one.wrong.append(f"{option.name}: {record.reason}")
    gc.collect()  # arms of the last problem hold argument lists and graphs, in circles
    rotations = shared_rotations(job.op, job.problem, here.device or "cpu", [o.kernel for o in fit])
    arms: dict[tuple[str, str], Any] = {}
    for option in fit:
        key = option.kernel.name, config_key(option.config)
        one.configs[key] = dict(option.config)
        one.defaults |= {key} if option.default else set()
        try:
            arms[key] = KernelArm(
                option.kernel, option.config, rotations[option.kernel.name], name=option.name, audited=False
            )
        except WrongResultError as error:
            one.wrong.append(f"{option.name}: {error}")
    if not arms:
        return one
    once = {key: arm.sample() for key, arm in arms.items()}
    far = HOPELESS * min(once.values())
    once |= {
        key: min(us, arms[key].sample()) for key, us in once.items() if us > far
    }  # it may have been disturbed
    heat = Heat([arm for key, arm in arms.items() if once[key] <= far])
    heat.run(1, chance)
    best_us = min(us for times in heat.times.values() for us in times)
    heat.arms = [arm for arm in heat.arms if heat.times[arm.name][0] <= SLOW * best_us]
    heat.run(ROUNDS - 1, chance)
    one.times = {key: heat.times.get(arm.name, [once[key]]) for key, arm in arms.items()}
    while one.times:  # what is called best has given right results while it was timed
        best = min(one.times, key=one.judged_us)
        try:
            arms[best].audit()
            one.best = best
            break
        except WrongResultError as error:
            one.wrong.append(f"{arms[best].name}: {error}")
            del one.times[best]
    return one


def ask(found: Sequence[Studied], here: Place, store: Store, records: Sequence[Verification]) -> None:
    """Fill in what each store picks, and what that loses."""
    tuned = {str(one.job.problem): _remembered(one, here) for one in found if one.best is not None}
    failed = [record for record in records if not record.ok]
    for one in found:
        if one.best is None:
            continue
        mine = str(one.job.problem)
        stores = {
            "store": _with(failed, store.timings),
            "tuned": _with(failed, [t for timings in tuned.values() for t in timings]),
            "left out": _with(
                failed, [t for problem, timings in tuned.items() if problem != mine for t in timings]
            ),
        }
        for name, held in stores.items():
            picked = _pick(one.job, here, held, {kernel for kernel, _ in one.times})
            key = None if picked is None else (picked[0].name, config_key(picked[1]))
            if key is not None and key in one.times:
                one.picks[name], one.regrets[name] = key, one.judged_us(key) / one.judged_us(one.best) - 1


def _remembered(one: Studied, here: Place) -> list[Timing]:
    """What a tuning by the first rounds would have written."""
    order = sorted(one.times, key=one.tuned_us)
    within = KEEP_WITHIN * one.tuned_us(order[0])
    near = {
        key[0]: key for key in reversed(order) if one.tuned_us(key) <= within
    }  # the fastest of each kernel
    kept = dict.fromkeys(
        [*order[:FINALISTS], *near.values(), *[key for key in order if key in one.defaults][:1]]
    )
    registry, op = default_registry(), one.job.op.name
    return [
        Timing(
            op=op,
            kernel=kernel,
            code=registry.kernel(op, kernel).code_hash(one.configs[kernel, config], built=True),
            config=one.configs[kernel, config],
            problem=str(one.job.problem),
            target=target_key(here.target),
            toolchain=here.build.key(),
            us=one.tuned_us((kernel, config)),
        )
        for kernel, config in kept
    ]


def _with(failed: Sequence[Verification], timings: Sequence[Timing]) -> Store:
    held = Store()
    for failure in failed:
        held.add(failure)
    for timing in timings:
        held.add(timing)
    return held


def _pick(
    job: Job, here: Place, store: Store, among: Collection[str] | None = None
) -> tuple[Kernel, Config] | None:
    """(kernel, configuration) that selection takes by `store`; None where nothing can run. among: kernels by name."""
    kernels = [k for k in default_registry().kernels_of(job.op.name) if among is None or k.name in among]
    best = select(job.op, job.problem, kernels, here.target, here.build, store, here.policy).best
    return None if best is None else (best.kernel, dict(best.config or {}))


@dataclass(frozen=True)
class Regret:
    """Over some problems. mean: geometric, of time over best, less one; worst: the largest, and of which problem."""

    problems: int
    mean: float
    worst: float
    where: str
    median: float


def summary(found: Sequence[Studied]) -> dict[str, Regret | None]:
    """Regret by store; that of the store in use apart for problems that it has times of, and for others.

    Problems of which candidates were left untried do not count: their best is not known.
    """
    whole = [one for one in found if one.best is not None and not one.missing]
    parts = {
        "store, tuned problems": [(one, one.regrets.get("store")) for one in whole if one.exact],
        "store, other problems": [(one, one.regrets.get("store")) for one in whole if not one.exact],
        "tuned in this run": [(one, one.regrets.get("tuned")) for one in whole],
        "left out of tuning": [(one, one.regrets.get("left out")) for one in whole],
    }
    return {name: _regret([(one, r) for one, r in pairs if r is not None]) for name, pairs in parts.items()}


def _regret(pairs: Sequence[tuple[Studied, float]]) -> Regret | None:
    if not pairs:
        return None
    one, worst = max(pairs, key=lambda pair: pair[1])
    mean = math.exp(statistics.mean(math.log1p(r) for _, r in pairs)) - 1
    return Regret(len(pairs), mean, worst, str(one.job.problem), statistics.median(r for _, r in pairs))


def unknown(found: Sequence[Studied], name: str) -> int:
    """Problems whose pick by the store `name` was not timed: it was wrong, or (from a file) no candidate then."""
    return sum(one.best is not None and name not in one.regrets for one in found)
