"""The noise floor of a machine: the measured difference of a kernel from itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gristmill.autotune.rounds import ROUNDS, Rounds, Timeable
from gristmill.bench.statistics.race import race
from gristmill.bench.statistics.verdict import SAME, UNCLEAR, Rule, Verdict


class NoiseError(ValueError):
    """A threshold that this machine cannot resolve."""


@dataclass(frozen=True)
class Noise:
    """The outcome of A/A comparisons.

    Attributes:
        floor: the 95 % quantile of |ratio - 1|.
        false: the number of FASTER and SLOWER verdicts.
        undecided: the number of UNCLEAR ones.
    """

    floor: float
    worst: float
    comparisons: int
    false: int
    undecided: int

    def refuse(self, min_effect: float) -> None:
        """NoiseError if `min_effect` is below the floor."""
        if min_effect < self.floor:
            raise NoiseError(
                f"a minimum effect of {min_effect:.2%} is below this machine's noise floor of {self.floor:.2%} "
                f"({self.comparisons} comparisons of a kernel with itself); choose a larger one, or use a quieter machine"
            )


def self_test(
    make: Callable[[str], Timeable], rule: Rule, *, comparisons: int = 20, rounds: int = ROUNDS, seed: int = 0
) -> Noise:
    """Compare `make("a")` with `make("b")`, two candidates of the same kernel, `comparisons` times, each judged separately."""
    verdicts = []
    for number in range(comparisons):
        timed = Rounds([make("a"), make("b")])
        verdicts.append(race({"": timed}, rule, rounds=rounds, seed=seed + number)["", "b"])
    return summarize(verdicts)


def summarize(verdicts: Sequence[Verdict]) -> Noise:
    """The noise in A/A verdicts."""
    if not verdicts:
        raise ValueError("no A/A comparison was made, so the noise is unknown")
    off = sorted(max(v.ratio, 1 / v.ratio) - 1 for v in verdicts)
    place = max(math.ceil(0.95 * len(off)) - 1, 0)
    return Noise(
        floor=off[place],
        worst=off[-1],
        comparisons=len(off),
        false=sum(v.verdict not in (SAME, UNCLEAR) for v in verdicts),
        undecided=sum(v.verdict == UNCLEAR for v in verdicts),
    )
