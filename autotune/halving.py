"""Successive halving: all candidates get a little time, the better half twice as much, until few are left for the final.

Jamieson and Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization" (2016). Every stage
times its candidates in turn, so that load that comes and goes hits all of them.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from gristmill.autotune.clock import now
from gristmill.autotune.rounds import ROUNDS, Rounds, Timeable

FINALISTS = 3
KEEP_WITHIN = 1.5
"""A candidate this many times slower than the best one is dropped, even if it is in the better half."""


A = TypeVar("A", bound=Timeable)


@dataclass(frozen=True)
class Placed(Generic[A]):
    """A finalist, with the median time of its rounds in the final, in microseconds."""

    candidate: A
    us: float
    samples: tuple[float, ...]


def halve(
    candidates: Sequence[A],
    *,
    keep: Sequence[A] = (),
    deadline: float = math.inf,
    rounds: int = ROUNDS,
    seed: int = 0,
    clock: Callable[[], float] = now,
    mhz: Callable[[], float | None] | None = None,
    kind: Callable[[A], str] | None = None,
) -> list[Placed[A]]:
    """The finalists of `candidates`, fastest first.

    Args:
        keep: candidates that are in the final whatever their time (the default).
        kind: the group of a candidate (its kernel). The fastest of each kind is in the final too, unless it is KEEP_WITHIN times slower than
            the best: selection for a similar problem prefers kernels with measured times to all others.
        deadline: on `clock`. After it no further stage starts, and the final has the least number of rounds that can rank.
        mhz: reads the device's clock; rounds of the final off its median do not count.
    """
    if not candidates:
        return []
    rng = random.Random(seed)
    left, take = list(candidates), 1
    seen: dict[str, list[float]] = {one.name: [] for one in left}
    while len(left) > FINALISTS and clock() < deadline:
        stage = Rounds(left)
        stage.run(take, rng)
        for candidate in left:
            seen[candidate.name] += stage.times[candidate.name]
        # The minimum of a few rounds ranks better than their median: disturbances only make a run longer.
        left.sort(key=lambda one: min(seen[one.name]))
        best = min(seen[left[0].name])
        count = max(FINALISTS, len(left) // 2)
        left = [one for one in left[:count] if min(seen[one.name]) <= KEEP_WITHIN * best]
        take *= 2
        if len(left) <= FINALISTS:
            break
    finalists = left[:FINALISTS]
    if kind is not None:
        finalists += _others(candidates, seen, {kind(one) for one in finalists}, kind)
    finalists += [one for one in keep if one not in finalists]
    final = Rounds(finalists, clock=mhz)
    final.run(2, rng)
    while final.count < rounds and clock() < deadline:
        final.run(2, rng)
    placed = [
        Placed(one, statistics.median(final.kept(one.name)), tuple(final.kept(one.name))) for one in finalists
    ]
    return sorted(placed, key=lambda one: one.us)


def _others(
    candidates: Sequence[A], seen: dict[str, list[float]], there: set[str], kind: Callable[[A], str]
) -> list[A]:
    """The fastest candidate of each kind that is not in `there`, if it is near the best."""
    fastest: dict[str, A] = {}
    timed = sorted((one for one in candidates if seen[one.name]), key=lambda one: min(seen[one.name]))
    for candidate in timed:
        if kind(candidate) not in there and min(seen[candidate.name]) <= KEEP_WITHIN * min(
            seen[timed[0].name]
        ):
            fastest.setdefault(kind(candidate), candidate)
    return list(fastest.values())
