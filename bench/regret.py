"""Regret of selection against exhaustive search: all candidates of a problem are timed in one run, and compared with the selected one.

For each problem every kernel at every configuration of its space is verified and timed in turn, in `ROUNDS` rounds (one, if
it is `SLOW` times behind; two samples, if `HOPELESS` times); nothing is ruled out by cost models, no space is sampled. Regret is
the time of what selection picks over the least of all, less one.
It is reported for several stores:

- ``store``: the one in use, with shipped times; separately for problems that it has times of, and others;
- ``tuned``: one made from the first half of the rounds, as `kernelbench tune` would have written it, judged by the second;
- ``left out``: the same without this problem's records, so that its neighbours decide.

The minimum of many noisy times is biased low, so regrets are overstated rather than understated.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from gristmill.autotune.clock import now
from gristmill.autotune.halving import KEEP_WITHIN
from gristmill.autotune.options import Job, Option, options
from gristmill.autotune.place import Place
from gristmill.autotune.rounds import Rounds
from gristmill.autotune.tune import prepared
from gristmill.autotune.verifying import BURST, key_of, verify_all
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.select import select
from gristmill.kernel_registry.store import Store, Timing, Verification, config_key, target_key

ROUNDS = 4
"""Rounds, each the minimum of three samples: half of them tune, half of them judge."""

FINALISTS = 3
"""Candidates of a problem that `tuned` records, besides the best default: as many as the final of a tuning run."""

SLOW = 2.0
"""A candidate this many times slower than the best of the first round is not timed in later rounds."""

HOPELESS = 3.0
"""A candidate whose first two samples are this many times the least first one is not timed again."""

SHOWN = 1.2
"""Candidates within this factor of the best are kept in result files with their samples; of others, the least time."""


@dataclass
class Studied:
    """One problem.

    Attributes:
        times: microseconds per round of every candidate that ran, by (kernel, configuration).
        exact: the store in use has times of this very problem.
        missing: candidates that were not tried, for lack of time.
        picks: store -> (kernel, configuration).
        regrets: store -> regret.
        seconds: the duration of timing.
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
        """Microseconds by the rounds that tune."""
        return min(self.times[key][: ROUNDS // 2])

    def judged_us(self, key: tuple[str, str]) -> float:
        """Microseconds by the rounds that judge; a candidate far behind has one round for both."""
        return min(self.times[key][ROUNDS // 2 :] or self.times[key])

    def as_dict(self) -> dict[str, Any]:
        """The row of JSON and result files: the best candidate's time as `us`, and the times of all."""
        best_us = None if self.best is None else self.judged_us(self.best)
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
            "times": self._table(),
            "seconds": round(self.seconds, 2),
        }

    def _table(self) -> dict[str, dict[str, Any]]:
        """The time of every candidate by kernel and configuration. Candidates near the best one, and those picked, have a time per
        round; others the judged time alone."""
        table: dict[str, dict[str, Any]] = {}
        picked = set(self.picks.values())
        nearest = 0.0 if self.best is None else SHOWN * self.judged_us(self.best)
        for key in sorted(self.times, key=self.judged_us):
            kernel, config = key
            us = self.judged_us(key)
            table.setdefault(kernel, {})[config] = self.times[key] if key in picked or us <= nearest else us
        return {kernel: folded(times) for kernel, times in table.items()}


def folded(times: dict[str, Any]) -> dict[str, Any]:
    """Times by configuration of one kernel, with what repeats written once: the parts that all of them have as "all", the names of the
    others as "of", and times by their values as "us", empty where a configuration has no such part."""
    split = [dict(part.split("=", 1) for part in config.split(",") if part) for config in times]
    shared = dict(set(split[0].items()).intersection(*(parts.items() for parts in split)))
    names = sorted({name for parts in split for name in parts} - shared.keys())
    return {
        "all": ",".join(f"{name}={shared[name]}" for name in sorted(shared)),
        "of": ",".join(names),
        "us": {
            ",".join(parts.get(name, "") for name in names): us
            for parts, us in zip(split, times.values(), strict=True)
        },
    }


def unfolded(table: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `folded`. Older files have no "all"."""
    names = table["of"].split(",")
    shared = [part for part in table.get("all", "").split(",") if part]
    times = {}
    for values, us in table["us"].items():
        pairs = zip(names, values.split(","), strict=True)
        parts = [f"{name}={value}" for name, value in pairs if name and value]
        times[",".join(sorted(shared + parts, key=lambda part: part.partition("=")[0]))] = us
    return times


def study(
    jobs: Sequence[Job],
    here: Place,
    store: Store,
    *,
    seconds: float,
    workers: int = 2,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
    each: Callable[[Studied], None] = lambda one: None,
) -> list[Studied]:
    """Study `jobs` in random order, so that a deadline leaves a fair sample; then evaluate the stores.

    `each` gets every problem that has been timed (regrets are set at the end, because stores are made from all problems).
    """
    from gristmill.autotune.worker import Worker

    begin, jobs = now(), list(jobs)
    random.Random(seed).shuffle(jobs)
    pool = [Worker() for _ in range(workers)]
    problems: list[Studied] = []
    records: list[Verification] = []
    outcomes: dict[Any, Verification] = {}
    try:
        for first in range(0, len(jobs), BURST):
            burst = jobs[first : first + BURST]
            if now() - begin > seconds:
                break
            candidates = {str(job.problem): _candidates(job, here, store) for job in burst}
            candidates_to_verify = [
                (job, option)
                for job in burst
                for option in candidates[str(job.problem)]
                if key_of(job, option) not in outcomes
            ]
            progress(
                f"{first + 1}/{len(jobs)}: verifying {len(candidates_to_verify)} candidates of {len(burst)} problems"
            )
            made, since = verify_all(candidates_to_verify, here, pool, begin + seconds), now()
            progress(f"{first + 1}/{len(jobs)}: verified {len(made)}; {seconds - now() + begin:.0f} s left")
            records += made
            outcomes |= {(r.op, r.problem, r.kernel, r.config): r for r in made}
            for number, job in enumerate(burst, first + 1):
                if now() - begin > seconds:
                    break
                progress(
                    f"{number}/{len(jobs)} {job.op.name} {job.problem}: {seconds - now() + begin:.0f} s left"
                )
                one = _time(job, candidates[str(job.problem)], outcomes, here, store, random.Random(seed))
                one.seconds, since = now() - since, now()
                problems.append(one)
                each(one)
    finally:
        for worker in pool:
            worker.close()
    ask(problems, here, store, records)
    return problems


def _candidates(job: Job, here: Place, store: Store) -> list[Option]:
    """Every option, and the pick of the store if it is not among them."""
    candidates = options(job, here, every=True)
    picked = _pick(job, here, store)
    if picked is not None and all(
        (o.kernel.name, config_key(o.config)) != (picked[0].name, config_key(picked[1])) for o in candidates
    ):
        candidates.append(Option(*picked, default=False))
    return candidates


def _time(
    job: Job,
    choices: Sequence[Option],
    outcomes: dict[Any, Verification],
    here: Place,
    store: Store,
    rng: random.Random,
) -> Studied:
    from gristmill.autotune.candidate import WrongResultError

    stored_times = [
        t for t in store.times(job.op.name, target_key(here.target)) if t.problem == str(job.problem)
    ]
    studied = Studied(job, exact=bool(stored_times))
    fit = []
    for option in choices:
        record = outcomes.get(key_of(job, option))
        if record is None:
            studied.missing += 1
        elif record.ok:
            fit.append(option)
        else:
            studied.wrong.append(f"{option.name}: {record.reason}")
    for option in fit:
        key = option.kernel.name, config_key(option.config)
        studied.configs[key] = dict(option.config)
        studied.defaults |= {key} if option.default else set()
    candidates = {
        (one.kernel.name, config_key(one.config)): one
        for one in prepared(job, fit, here.device or "cpu", studied.wrong)
    }
    if not candidates:
        return studied
    once = {key: one.sample() for key, one in candidates.items()}
    far = HOPELESS * min(once.values())
    once |= {
        key: min(us, candidates[key].sample()) for key, us in once.items() if us > far
    }  # it may have been disturbed
    timed = Rounds([one for key, one in candidates.items() if once[key] <= far])
    timed.run(1, rng)
    best_us = min(us for times in timed.times.values() for us in times)
    timed.candidates = [one for one in timed.candidates if timed.times[one.name][0] <= SLOW * best_us]
    timed.run(ROUNDS - 1, rng)
    studied.times = {key: timed.times.get(one.name, [once[key]]) for key, one in candidates.items()}
    while studied.times:  # the best candidate must have given correct results while it was timed
        best = min(studied.times, key=studied.judged_us)
        try:
            candidates[best].audit()
            studied.best = best
            break
        except WrongResultError as error:
            studied.wrong.append(f"{candidates[best].name}: {error}")
            del studied.times[best]
    return studied


def ask(problems: Sequence[Studied], here: Place, store: Store, records: Sequence[Verification]) -> None:
    """Set the pick of each store and its regret."""
    tuned = {str(one.job.problem): _remembered(one, here) for one in problems if one.best is not None}
    failed = [record for record in records if not record.ok]
    for one in problems:
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
        for name, store_to_ask in stores.items():
            picked = _pick(one.job, here, store_to_ask, {kernel for kernel, _ in one.times})
            key = None if picked is None else (picked[0].name, config_key(picked[1]))
            if key is not None and key in one.times:
                one.picks[name], one.regrets[name] = key, one.judged_us(key) / one.judged_us(one.best) - 1


def _remembered(one: Studied, here: Place) -> list[Timing]:
    """The records that a tuning run over the first rounds would have written."""
    order = sorted(one.times, key=one.tuned_us)
    within = KEEP_WITHIN * one.tuned_us(order[0])
    near = {
        key[0]: key for key in reversed(order) if one.tuned_us(key) <= within
    }  # the fastest of each kernel
    fastest = dict.fromkeys(
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
        for kernel, config in fastest
    ]


def _with(failed: Sequence[Verification], timings: Sequence[Timing]) -> Store:
    store = Store()
    for failure in failed:
        store.add(failure)
    for timing in timings:
        store.add(timing)
    return store


def _pick(
    job: Job, here: Place, store: Store, among: Collection[str] | None = None
) -> tuple[Kernel, Config] | None:
    """The (kernel, configuration) that selection picks with `store`; None if no kernel can run. Only kernels named in `among` count."""
    kernels = [k for k in default_registry().kernels_of(job.op.name) if among is None or k.name in among]
    best = select(job.op, job.problem, kernels, here.target, here.build, store, here.policy).best
    return None if best is None else (best.kernel, dict(best.config or {}))


@dataclass(frozen=True)
class Regret:
    """Regret over several problems.

    Attributes:
        mean: geometric mean of time over best, minus one.
        worst: the largest, with its problem.
    """

    problems: int
    mean: float
    worst: float
    where: str
    median: float


def summary(problems: Sequence[Studied]) -> dict[str, Regret | None]:
    """Regret by store; that of the store in use is separate for problems that it has times of, and for others.

    Problems with untried candidates do not count: their best candidate is not known.
    """
    complete = [problem for problem in problems if problem.best is not None and not problem.missing]
    parts = {
        "store, tuned problems": [
            (problem, problem.regrets.get("store")) for problem in complete if problem.exact
        ],
        "store, other problems": [
            (problem, problem.regrets.get("store")) for problem in complete if not problem.exact
        ],
        "tuned in this run": [(problem, problem.regrets.get("tuned")) for problem in complete],
        "left out of tuning": [(problem, problem.regrets.get("left out")) for problem in complete],
    }
    return {
        name: _regret([(problem, r) for problem, r in pairs if r is not None])
        for name, pairs in parts.items()
    }


def _regret(pairs: Sequence[tuple[Studied, float]]) -> Regret | None:
    if not pairs:
        return None
    one, worst = max(pairs, key=lambda pair: pair[1])
    mean = math.exp(statistics.mean(math.log1p(r) for _, r in pairs)) - 1
    return Regret(len(pairs), mean, worst, str(one.job.problem), statistics.median(r for _, r in pairs))


def unknown(problems: Sequence[Studied], name: str) -> int:
    """Problems whose pick by the store `name` has no time: it was wrong or, in a replayed file, not a candidate."""
    return sum(problem.best is not None and name not in problem.regrets for problem in problems)
