"""Interleaved timing: every candidate is timed in every round."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gristmill.autotune.clock import now

REPEATS = 3
"""Samples of each candidate within a round. The minimum counts, because disturbances only make a run longer."""

LONG_US = 50_000.0
"""Calls longer than this many microseconds are timed once per round: disturbances are short in comparison."""

CLOCK_WITHIN = 0.02
"""A round does not count if its clock differs from the median clock by more than this fraction."""

ROUNDS = 16
"""Rounds before rows are first judged. Each further look doubles the rounds of an UNCLEAR row."""


class Timeable(Protocol):
    """Something to time: `sample` runs it and returns microseconds per call."""

    name: str

    def sample(self) -> float: ...


@dataclass
class Rounds:
    """The candidates of one problem, the baseline first, and their samples per round (microseconds).

    Attributes:
        clock: reads the device's clock (MHz), if that varies.
        clocks: its value at the end of each round.
    """

    candidates: Sequence[Timeable]
    times: dict[str, list[float]] = field(default_factory=dict)
    between: Callable[[], None] | None = None
    clock: Callable[[], float | None] | None = None
    clocks: list[float | None] = field(default_factory=list)
    seconds: float = 0.0

    def run(self, rounds: int, rng: random.Random) -> None:
        """Time every candidate in `rounds` more rounds.

        Each round draws a new order and runs it forwards and backwards, so that neither position nor drift favours a candidate.
        """
        begin = now()
        for _ in range(rounds):
            order = list(self.candidates)
            rng.shuffle(order)
            best = dict.fromkeys((candidate.name for candidate in order), math.inf)
            for repeat in range(REPEATS):
                for candidate in order if repeat % 2 == 0 else reversed(order):
                    if repeat and best[candidate.name] > LONG_US:
                        continue
                    best[candidate.name] = min(best[candidate.name], candidate.sample())
            for name, us in best.items():
                self.times.setdefault(name, []).append(us)
            self.clocks.append(None if self.clock is None else self.clock())
            if self.between is not None:
                self.between()
        self.seconds += now() - begin

    @property
    def count(self) -> int:
        """Rounds taken so far."""
        return len(self.times.get(self.candidates[0].name, ()))

    @property
    def steady(self) -> list[int]:
        """The rounds that count: those within CLOCK_WITHIN of the median clock. All rounds if clocks are unknown, or if too
        few are near the median."""
        known = [mhz for mhz in self.clocks if mhz]
        if not known:
            return [*range(self.count)]
        middle = statistics.median(known)
        steady = [n for n, mhz in enumerate(self.clocks) if not mhz or abs(mhz / middle - 1) <= CLOCK_WITHIN]
        return steady if 2 * len(steady) >= len(self.clocks) else [*range(self.count)]

    def kept(self, name: str) -> list[float]:
        """The samples of a candidate in the rounds that count."""
        return [self.times[name][n] for n in self.steady]

    def logs(self, name: str) -> list[float]:
        """log(candidate / baseline), one per round that counts."""
        if not self.count:
            return []
        return [
            math.log(us / at)
            for us, at in zip(self.kept(name), self.kept(self.candidates[0].name), strict=True)
        ]
