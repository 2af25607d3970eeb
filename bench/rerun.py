"""Repeat a result file on this machine: every row is measured again, and differences are reported."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gristmill.autotune.clock import now
from gristmill.autotune.place import Place, imported
from gristmill.autotune.rounds import REPEATS
from gristmill.bench.history import median_error
from gristmill.bench.result_file import attributes, samples
from gristmill.bench.statistics.verdict import MERGED_ROUNDS, Rule, Verdict, judge, merge
from gristmill.kernel_registry.registry import UnknownError, default_registry

SECONDS = 3.0
"""The time limit of a row in seconds: correlated rounds carry less information, so more of them are taken."""

NEW = "NEW"
"""Verdict of a row that had no time in the file and has one now."""


@dataclass(frozen=True)
class Repeated:
    """One row, then and now.

    Attributes:
        comparison: the verdict on the ratio now over then.
        verdict: its verdict, or GAP or WRONG.
    """

    row: dict[str, Any]
    verdict: str
    then_us: float | None
    now_us: float | None = None
    comparison: Verdict | None = None
    error: float | None = None
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The row of JSON."""
        return {
            **{name: self.row[name] for name in ("op", "problem", "kernel")},
            **attributes(self, "verdict", "then_us", "now_us"),
            **attributes(self.comparison, "ratio", "low", "high"),
            "error": self.error,
            "then_error": self.row.get("error"),
            "reason": self.reason,
        }


def rerun(
    data: dict[str, Any],
    here: Place,
    rule: Rule,
    *,
    rounds: int = 16,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Repeated]:
    """Measure every row of a result file in its configuration, audited, and compare with the stored times. Rows without a time
    both then and now do not differ, and are left out.

    The uncertainty of the old median does not count: the nearer end of its interval is used. Old and new times were not taken
    in turn, so on another or a busy machine a difference may come from the machine.
    """
    from gristmill.autotune.candidate import WrongResultError

    rows = data["rows"]
    here = imported(
        here,
        [
            k
            for row in rows
            for k in default_registry().all_kernels()
            if (k.op, k.name) == (row["op"], row["kernel"])
        ],
    )
    repeated: list[Repeated] = []
    logs: list[list[float]] = []
    taken: list[tuple[int, float]] = []
    for row in rows:
        before = samples(row) if row.get("us") else []
        then = statistics.median(before) if before else None
        progress(f"{row['kernel']} {row['problem']}")
        try:
            times, error = _measure(row, here, rounds)
        except _Gap as gap:
            if then is None:
                continue
            repeated.append(Repeated(row, "GAP", then, reason=str(gap)))
        except WrongResultError as wrong:
            repeated.append(Repeated(row, "WRONG", then, reason=str(wrong)))
        else:
            middle = statistics.median(times)
            if then is None:
                repeated.append(
                    Repeated(
                        row,
                        NEW,
                        None,
                        middle,
                        error=error,
                        reason=f"had no time: {row.get('reason') or 'no reason was given'}",
                    )
                )
                continue
            off = median_error(before)
            near = min(max(middle, then - off), then + off)
            taken.append((len(repeated), near / then))
            logs.append([math.log(us / near) for us in times])
            repeated.append(Repeated(row, "", then, middle, error=error))
    for (place, scale), verdict in zip(taken, judge(logs, rule), strict=True):
        to_then = replace(
            verdict, ratio=verdict.ratio * scale, low=verdict.low * scale, high=verdict.high * scale
        )
        repeated[place] = replace(
            repeated[place], verdict=verdict.verdict, comparison=to_then, reason=verdict.reason
        )
    return repeated


class _Gap(Exception):
    """A row that cannot be measured here."""


def _measure(row: dict[str, Any], here: Place, rounds: int) -> tuple[Sequence[float], float]:
    from gristmill.autotune.candidate import Candidate, TimingMode, WrongResultError, shared_rotations
    from gristmill.autotune.errors import UnverifiableError
    from gristmill.bench.compare import verified

    try:
        op = default_registry().op(row["op"])
        kernel, problem = default_registry().kernel(op.name, row["kernel"]), op.problem(row["problem"])
    except (UnknownError, ValueError) as error:
        raise _Gap(str(error)) from error
    if reason := here.why_not(kernel, problem):
        raise _Gap(reason)
    # A configuration of another device's code level does not run here.
    same = row.get("config") is not None and here.device != "cpu"
    config = row["config"] if same else kernel.config(problem, here.target)
    device = here.device or "cpu"
    try:
        wrong = verified(op, kernel, config, problem, device)
    except UnverifiableError as error:
        raise _Gap(str(error)) from error
    if wrong:
        raise WrongResultError(f"{kernel.name}: {wrong}")
    mode = TimingMode.parse(str(row.get("timing") or ""))  # older files do not contain it: as deployed, cold
    try:
        rotation = shared_rotations(op, problem, device, [kernel], hot=mode.hot)[kernel.name]
    except UnverifiableError as error:
        raise _Gap(str(error)) from error
    candidate = Candidate(kernel, config, rotation, eager=mode.eager, isolated=mode.isolated)
    times: list[float] = []
    begin = now()
    while not times or (
        now() - begin < SECONDS and len(merge([math.log(us) for us in times])) < MERGED_ROUNDS
    ):
        times += [min(candidate.sample() for _ in range(REPEATS)) for _ in range(rounds)]
    candidate.conclude()
    return times, candidate.error


def differences(data: dict[str, Any], here: Place) -> list[str]:
    """How this environment differs from the one of a result file, in words."""
    from gristmill.autotune.environment import environment

    then, now = data.get("environment", {}), environment(here.target, "")
    names = ("target", "device", "torch", "triton", "toolchain", "gristmill", "python")
    return [
        f"{name}: {then.get(name)} then, {now.get(name)} now"
        for name in names
        if then.get(name) != now.get(name)
    ]
