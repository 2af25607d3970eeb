"""Interleaved rounds: every arm is timed in every round, and UNCLEAR rows get more rounds."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gristmill.autotune.clock import now
from gristmill.bench.statistics.verdict import UNCLEAR, Rule, Verdict, judge

REPEATS = 3
"""Samples of each arm within a round. The minimum counts, because disturbances only make a run longer."""

LONG_US = 50_000.0
"""Calls longer than this many microseconds are timed once per round: disturbances are short in comparison."""

CLOCK_WITHIN = 0.02
"""A round does not count if its clock differs from the median clock by more than this fraction."""

SECONDS = 30.0
"""Seconds after which a heat gets no more rounds."""

ROUNDS = 16
"""Rounds before rows are first judged. Each further look doubles the rounds of an UNCLEAR row."""


class Arm(Protocol):
    """Something to time: `sample` runs it and returns microseconds per call."""

    name: str

    def sample(self) -> float: ...


@dataclass
class Heat:
    """The arms of one problem, the baseline first, and their samples per round (microseconds).

    clock: reads the device's clock (MHz), if that varies; clocks: its value at the end of each round.
    """

    arms: Sequence[Arm]
    times: dict[str, list[float]] = field(default_factory=dict)
    between: Callable[[], None] | None = None
    clock: Callable[[], float | None] | None = None
    clocks: list[float | None] = field(default_factory=list)
    seconds: float = 0.0

    def run(self, rounds: int, chance: random.Random) -> None:
        """Time every arm in `rounds` more rounds.

        Each round draws a new order and runs it forwards and backwards, so that neither position nor drift favours an arm.
        """
        begin = now()
        for _ in range(rounds):
            order = list(self.arms)
            chance.shuffle(order)
            best = dict.fromkeys((arm.name for arm in order), math.inf)
            for repeat in range(REPEATS):
                for arm in order if repeat % 2 == 0 else reversed(order):
                    if repeat and best[arm.name] > LONG_US:
                        continue
                    best[arm.name] = min(best[arm.name], arm.sample())
            for name, us in best.items():
                self.times.setdefault(name, []).append(us)
            self.clocks.append(None if self.clock is None else self.clock())
            if self.between is not None:
                self.between()
        self.seconds += now() - begin

    @property
    def rounds(self) -> int:
        """Rounds taken so far."""
        return len(self.times.get(self.arms[0].name, ()))

    @property
    def steady(self) -> list[int]:
        """The rounds that count: those within CLOCK_WITHIN of the median clock. All rounds if clocks are unknown, or if too
        few are near the median."""
        known = [mhz for mhz in self.clocks if mhz]
        if not known:
            return [*range(self.rounds)]
        middle = statistics.median(known)
        steady = [n for n, mhz in enumerate(self.clocks) if not mhz or abs(mhz / middle - 1) <= CLOCK_WITHIN]
        return steady if 2 * len(steady) >= len(self.clocks) else [*range(self.rounds)]

    def kept(self, name: str) -> list[float]:
        """The samples of an arm in the rounds that count."""
        return [self.times[name][n] for n in self.steady]

    def logs(self, name: str) -> list[float]:
        """log(arm / baseline), one per round that counts."""
        if not self.rounds:
            return []
        return [
            math.log(us / at) for us, at in zip(self.kept(name), self.kept(self.arms[0].name), strict=True)
        ]


def race(
    heats: Mapping[str, Heat],
    rule: Rule,
    *,
    rounds: int = ROUNDS,
    seconds: float = SECONDS,
    seed: int = 0,
    shift: Callable[[str, str, Sequence[float]], float] = lambda key, arm, logs: 0.0,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[tuple[str, str], Verdict]:
    """Run every heat, judge all their rows together, give heats with UNCLEAR rows as many rounds again, and so on.

    Returns the verdict of every (heat, arm) but the baselines'. At most `rule.looks` looks are taken, and none of a heat
    that has taken `seconds`, so it has at most rounds · 2^(looks - 1) rounds; rows that are UNCLEAR then remain so.

    shift: (heat, arm, log ratios) -> the log that they are judged relative to; 0: relative to the baseline's times.
    """
    chance = random.Random(seed)
    rows = [(key, arm.name) for key, heat in heats.items() for arm in heat.arms[1:]]
    open_heats = list(heats)
    verdicts: dict[tuple[str, str], Verdict] = {}
    for look in range(rule.looks):
        for key in open_heats:
            progress(f"{key}: look {look + 1} of {rule.looks}")
            heats[key].run(heats[key].rounds or rounds, chance)
        logs = {row: heats[row[0]].logs(row[1]) for row in rows}
        judged = judge(
            [[log - shift(*row, own) for log in own] for row, own in logs.items()], rule, seed=seed
        )
        verdicts = dict(zip(rows, judged, strict=True))
        unclear = {key for (key, _), verdict in verdicts.items() if verdict.verdict == UNCLEAR}
        open_heats = [key for key, heat in heats.items() if key in unclear and heat.seconds < seconds]
        if not open_heats:
            break
    return verdicts
