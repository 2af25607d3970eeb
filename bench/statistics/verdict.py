"""FASTER, SLOWER, SAME or UNCLEAR: verdicts from paired samples, over many rows at once.

A sample is the logarithm of candidate over baseline, both timed in the same round. Three measures keep verdicts valid:

- a minimum effect: the null hypothesis of SLOWER is "not slower by more than the minimum effect", not "exactly equal";
- autocorrelated rounds (load that comes and goes) are merged until they are independent; the lag-1 autocorrelation
  determines how many to merge;
- the false discovery rate is controlled over all rows judged together (Benjamini and Hochberg, 1995), and the level is
  divided among the looks of a run that adds rounds (Bonferroni).

Tests are Wilcoxon's signed-rank test; intervals are percentile bootstraps of the median. Needs scipy (the extra `bench`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

FASTER, SLOWER, SAME, UNCLEAR = "FASTER", "SLOWER", "SAME", "UNCLEAR"
MERGED_ROUNDS = 8
"""The minimum of independent rounds for a verdict: with fewer the signed-rank test cannot reach small p-values."""

RESAMPLES = 4000


@dataclass(frozen=True)
class Rule:
    """The rule of verdicts.

    Attributes:
        min_effect: the smallest relative change that gets one, 0.03 = 3 %.
        level: false discovery rate.
        looks: how often rows may be judged, including the last time; each look gets an equal share of the level.
    """

    min_effect: float = 0.03
    level: float = 0.05
    looks: int = 4

    def __post_init__(self) -> None:
        if not 0 < self.min_effect < 1:
            raise ValueError(
                f"the minimum effect is {self.min_effect}; expected a fraction between 0 and 1, such as 0.03"
            )
        if not 0 < self.level < 1 or self.looks < 1:
            raise ValueError(
                f"level {self.level} and looks {self.looks}: expected a level in (0, 1) and at least one look"
            )


@dataclass(frozen=True)
class Verdict:
    """The verdict on one row.

    Attributes:
        ratio: candidate over baseline, the median.
        low, high: its interval.
        p: p-value of the likelier direction, adjusted for all rows.
        rounds, independent: the number of samples, before and after merging.
    """

    verdict: str
    ratio: float
    low: float
    high: float
    p: float
    rounds: int
    independent: int
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The fields that tables, JSON and result files share."""
        return asdict(self)


def judge(rows: Sequence[Sequence[float]], rule: Rule | None = None, *, seed: int = 0) -> list[Verdict]:
    """A verdict for each row of log ratios (candidate over baseline, one per round), all rows judged together."""
    import numpy as np
    from scipy.stats import false_discovery_control

    rule = rule or Rule()
    if not rows:
        return []
    level, band = rule.level / rule.looks, math.log1p(rule.min_effect)
    generator = np.random.default_rng(seed)
    merged = [merge(row) for row in rows]
    tests = [_direction(row, band) for row in merged]
    adjusted = false_discovery_control([p for _, p in tests])
    verdicts = []
    for row, samples, (direction, _), p in zip(rows, merged, tests, adjusted, strict=True):
        low, high = interval(samples, level, generator)
        middle = float(np.median(samples)) if len(samples) else math.nan
        verdict, reason = UNCLEAR, ""
        if len(samples) < MERGED_ROUNDS:
            reason = (
                f"{len(row)} rounds amount to {len(samples)} independent ones; {MERGED_ROUNDS} are needed"
            )
        elif p <= level and direction == SLOWER and low > band:
            verdict = SLOWER
        elif p <= level and direction == FASTER and high < -band:
            verdict = FASTER
        elif -band <= low and high <= band:
            verdict = SAME
        elif low > band or high < -band:
            reason = f"the interval is beyond a change of {rule.min_effect:.1%}, which among {len(rows)} rows may be chance (p = {p:.2g})"
        else:
            reason = f"the interval reaches both sides of a change of {rule.min_effect:.1%}"
        verdicts.append(
            Verdict(
                verdict,
                math.exp(middle),
                math.exp(low),
                math.exp(high),
                float(p),
                len(row),
                len(samples),
                reason,
            )
        )
    return verdicts


def merge(row: Sequence[float]) -> Any:
    """Medians of as many consecutive rounds as must be merged for them to be independent (a numpy array)."""
    import numpy as np

    samples = np.asarray(row, dtype=float)
    if not np.isfinite(samples).all():
        raise ValueError("samples must be finite; a time of zero or below has no logarithm")
    if len(samples) < 4:
        return samples
    # Ranks, because outliers would hide the correlation of the other samples.
    ranks = samples.argsort().argsort().astype(float)
    ranks -= ranks.mean()
    correlation = float((ranks[1:] * ranks[:-1]).sum() / (ranks * ranks).sum())
    # By chance the correlation exceeds 2/sqrt(n) in one case of forty; only the part above it counts.
    if correlation <= 2 / math.sqrt(len(samples)):
        return samples
    size = math.ceil((1 + correlation) / (1 - min(correlation, 0.9)))
    count = max(len(samples) // size, 1)
    return np.array([np.median(part) for part in np.array_split(samples, count)])


def interval(samples: Sequence[float], level: float, generator: Any) -> tuple[float, float]:
    """The bootstrap interval of the median that misses it with probability `level`, level / 2 on either side."""
    import numpy as np

    values = np.asarray(samples, dtype=float)
    if len(values) < 2:
        return -math.inf, math.inf
    medians = np.median(values[generator.integers(0, len(values), (RESAMPLES, len(values)))], axis=1)
    low, high = np.quantile(medians, (level / 2, 1 - level / 2))
    return float(low), float(high)


def _direction(samples: Any, band: float) -> tuple[str, float]:
    """The likelier direction, and the p-value of "not beyond the minimum effect in that direction", doubled for the choice."""
    from scipy.stats import wilcoxon

    if len(samples) < 2:
        return SLOWER, 1.0
    slower = float(wilcoxon(samples - band, alternative="greater").pvalue)
    faster = float(wilcoxon(samples + band, alternative="less").pvalue)
    return (SLOWER, min(1.0, 2 * slower)) if slower <= faster else (FASTER, min(1.0, 2 * faster))
