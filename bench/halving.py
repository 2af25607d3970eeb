"""Successive halving: many candidates get a little time, the better half twice as much, until few are left to be raced.

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
"""A candidate this many times slower than the best so far is dropped whatever the half."""


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

    kind: what an arm is one of (its kernel). The fastest so far of each kind is in the final, too, unless it is KEEP_WITHIN times slower
    than the best: for a problem near by, a kernel of which nothing is known is passed over however good its model's word is.
    deadline: on `clock`. Past it no further stage begins, and the final has as few rounds as it takes to rank.
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
        # The least of a few rounds ranks better than their median: what disturbs a run only makes it longer.
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
    """The fastest of each kind that is not `there`, of those that come near the best."""
    fastest: dict[str, A] = {}
    timed = sorted((arm for arm in arms if seen[arm.name]), key=lambda arm: min(seen[arm.name]))
    for arm in timed:
        if kind(arm) not in there and min(seen[arm.name]) <= KEEP_WITHIN * min(seen[timed[0].name]):
            fastest.setdefault(kind(arm), arm)
    return list(fastest.values())
