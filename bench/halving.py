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
from gristmill.bench.statistics.rounds import ROUNDS, Arm, Heat

FINALISTS = 3
KEEP_WITHIN = 1.5
"""A candidate this many times slower than the best one is dropped, even if it is in the better half."""


A = TypeVar("A", bound=Arm)


@dataclass(frozen=True)
class Placed(Generic[A]):
    """A finalist. us: median microseconds of its rounds in the final."""

    arm: A
    us: float
    samples: tuple[float, ...]


def halve(
    arms: Sequence[A],
    *,
    keep: Sequence[A] = (),
    deadline: float = math.inf,
    rounds: int = ROUNDS,
    seed: int = 0,
    clock: Callable[[], float] = now,
    mhz: Callable[[], float | None] | None = None,
    kind: Callable[[A], str] | None = None,
) -> list[Placed[A]]:
    """The finalists of `arms`, fastest first. keep: arms that are in the final whatever their time (the default).

    kind: the group of an arm (its kernel). The fastest arm of each kind is in the final too, unless it is KEEP_WITHIN times slower
    than the best: selection for a similar problem prefers kernels with measured times to all others.
    deadline: on `clock`. After it no further stage starts, and the final has the least number of rounds that can rank.
    mhz: reads the device's clock; rounds of the final off its median do not count.
    """
    if not arms:
        return []
    chance = random.Random(seed)
    left, take = list(arms), 1
    seen: dict[str, list[float]] = {arm.name: [] for arm in left}
    while len(left) > FINALISTS and clock() < deadline:
        heat = Heat(left)
        heat.run(take, chance)
        for arm in left:
            seen[arm.name] += heat.times[arm.name]
        # The minimum of a few rounds ranks better than their median: disturbances only make a run longer.
        left.sort(key=lambda arm: min(seen[arm.name]))
        best = min(seen[left[0].name])
        count = max(FINALISTS, len(left) // 2)
        left = [arm for arm in left[:count] if min(seen[arm.name]) <= KEEP_WITHIN * best]
        take *= 2
        if len(left) <= FINALISTS:
            break
    finalists = left[:FINALISTS]
    if kind is not None:
        finalists += _others(arms, seen, {kind(arm) for arm in finalists}, kind)
    finalists += [arm for arm in keep if arm not in finalists]
    final = Heat(finalists, clock=mhz)
    final.run(2, chance)
    while final.rounds < rounds and clock() < deadline:
        final.run(2, chance)
    placed = [
        Placed(arm, statistics.median(final.kept(arm.name)), tuple(final.kept(arm.name))) for arm in finalists
    ]
    return sorted(placed, key=lambda one: one.us)


def _others(
    arms: Sequence[A], seen: dict[str, list[float]], there: set[str], kind: Callable[[A], str]
) -> list[A]:
    """The fastest arm of each kind that is not in `there`, if it is near the best."""
    fastest: dict[str, A] = {}
    timed = sorted((arm for arm in arms if seen[arm.name]), key=lambda arm: min(seen[arm.name]))
    for arm in timed:
        if kind(arm) not in there and min(seen[arm.name]) <= KEEP_WITHIN * min(seen[timed[0].name]):
            fastest.setdefault(kind(arm), arm)
    return list(fastest.values())
