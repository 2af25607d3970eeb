"""Races: interleaved rounds whose UNCLEAR rows get more rounds."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from gristmill.autotune.rounds import ROUNDS, Rounds
from gristmill.bench.statistics.verdict import UNCLEAR, Rule, Verdict, judge

SECONDS = 30.0
"""Seconds after which a problem gets no more rounds."""


def race(
    problems: Mapping[str, Rounds],
    rule: Rule,
    *,
    rounds: int = ROUNDS,
    seconds: float = SECONDS,
    seed: int = 0,
    shift: Callable[[str, str, Sequence[float]], float] = lambda key, candidate, logs: 0.0,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[tuple[str, str], Verdict]:
    """Time every problem, judge all rows together, give problems with UNCLEAR rows as many rounds again, and so on.

    Returns the verdict of every (problem, candidate) but the baselines'. At most `rule.looks` looks are taken, and none of a
    problem that has taken `seconds`, so it has at most rounds · 2^(looks - 1) rounds; rows that are UNCLEAR then remain so.

    ``shift(problem, candidate, logs)`` returns the log that the log ratios are judged relative to; 0 is the baseline's time.
    """
    rng = random.Random(seed)
    rows = [(key, candidate.name) for key, timed in problems.items() for candidate in timed.candidates[1:]]
    unsettled = list(problems)
    verdicts: dict[tuple[str, str], Verdict] = {}
    for look in range(rule.looks):
        for key in unsettled:
            progress(f"{key}: look {look + 1} of {rule.looks}")
            problems[key].run(problems[key].count or rounds, rng)
        logs = {row: problems[row[0]].logs(row[1]) for row in rows}
        judged = judge(
            [[log - shift(*row, own) for log in own] for row, own in logs.items()], rule, seed=seed
        )
        verdicts = dict(zip(rows, judged, strict=True))
        unclear = {key for (key, _), verdict in verdicts.items() if verdict.verdict == UNCLEAR}
        unsettled = [key for key, timed in problems.items() if key in unclear and timed.seconds < seconds]
        if not unsettled:
            break
    return verdicts
