"""Compare kernels on problems: candidates are timed in turn, audited, and judged together. `kernelbench compare` and `check` use it."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from gristmill.autotune.gpu_clock import sm_clock
from gristmill.autotune.place import Place
from gristmill.autotune.rounds import ROUNDS, Rounds
from gristmill.bench.result_file import attributes
from gristmill.bench.statistics.race import SECONDS, race
from gristmill.bench.statistics.verdict import SAME, UNCLEAR, Rule, Verdict, judge
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem

WRONG, GAP = "WRONG", "GAP"
"""Other verdicts of a row: the kernel gave a wrong result or cheated; it cannot run here, for the given reason."""

CPU_MEMORY, GPU_MEMORY = 1 << 30, 32 << 30
"""The limit on argument lists held at a time, in bytes."""

FLOOR = ("floor_us", "floor_source", "fraction_of_floor", "bound", "note")
"""The fields of a row about its floor."""

TWIN = "(again)"
"""Name suffix of the baseline's second candidate, whose difference from the first is noise."""


@dataclass
class Row:
    """One kernel against the baseline on one problem.

    Attributes:
        us: median microseconds.
        noise: the measured difference of the baseline from itself.
        floor: the values of FLOOR, None until `add_floors`.
    """

    op: str
    problem: str
    kernel: str
    baseline: str
    verdict: str
    reason: str = ""
    us: float | None = None
    baseline_us: float | None = None
    comparison: Verdict | None = None
    noise: float | None = None
    error: float | None = None
    tolerance: float | None = None
    timing: str | None = None
    config: Config | None = None
    samples: Sequence[float] = field(default_factory=tuple)
    baseline_samples: Sequence[float] = field(default_factory=tuple)
    floor: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(FLOOR))

    def as_dict(self) -> dict[str, Any]:
        """The row of JSON and result files."""
        return {
            **attributes(self, "op", "problem", "kernel", "baseline", "verdict"),
            **attributes(self.comparison, "ratio", "low", "high", "p", "rounds"),
            "us": self.us,
            "baseline_us": self.baseline_us,
            **attributes(self, "noise", "error", "tolerance", "timing"),
            "config": dict(self.config) if self.config is not None else None,
            **self.floor,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Case:
    """A problem, its baseline kernel, and the kernels to compare with it."""

    op: Op
    problem: Problem
    baseline: Kernel
    others: tuple[Kernel, ...]

    @property
    def key(self) -> str:
        return f"{self.op.name} {self.problem}"


def compare(
    cases: Sequence[Case],
    here: Place,
    rule: Rule,
    *,
    hot: bool = False,
    rounds: int = ROUNDS,
    seconds: float = SECONDS,
    seed: int = 0,
    shift: Callable[[str, str, Sequence[float]], float] = lambda key, kernel, logs: 0.0,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Race every case's kernels against its baseline, and the baseline against itself.

    Every kernel is audited before, at random moments during, and after its timing; a kernel that fails is WRONG. A problem
    whose baseline does not agree with itself within the minimum effect stays UNCLEAR: the machine is too noisy for it.
    Cases are raced in groups that fit in memory together, and judged all together. `shift`, as in `race`, decides only which cases get
    more rounds.
    """
    rows: list[Row] = []
    raced: list[_Raced] = []
    rng = random.Random(seed)
    for group in _groups(cases, here):
        timed: dict[str, Rounds] = {}
        for case in group:
            progress(f"{case.key}: preparing")
            candidates, failed = _candidates(case, here, hot)
            rows += failed
            if candidates:
                timed[case.key] = Rounds(
                    candidates, between=auditor(candidates, rng), clock=sm_clock(here.device or "cpu")
                )
        race(timed, rule, rounds=rounds, seconds=seconds, seed=seed, shift=shift, progress=progress)
        raced += [
            finished for case in group if case.key in timed for finished in _finish(case, timed[case.key])
        ]
    verdicts = judge([candidate.logs for candidate in raced], rule, seed=seed)
    twins = {
        candidate.case.key: verdict
        for candidate, verdict in zip(raced, verdicts, strict=True)
        if candidate.twin
    }
    rows += [
        _settle(candidate, verdict, twins[candidate.case.key], rule)
        for candidate, verdict in zip(raced, verdicts, strict=True)
        if not candidate.twin
    ]
    place = {case.key: number for number, case in enumerate(cases)}
    return sorted(rows, key=lambda row: (row.verdict == GAP, place[f"{row.op} {row.problem}"]))


def add_floors(rows: Sequence[Row], cases: Sequence[Case], here: Place) -> None:
    """Set the floor of every row that has a time, measured in the timing mode of the row."""
    from gristmill.autotune.candidate import TimingMode
    from gristmill.autotune.floor import row_floor

    costs = {(case.op.name, str(case.problem)): case.op.cost(case.problem) for case in cases}
    for row in rows:
        if row.us is not None and row.timing is not None:
            mode = TimingMode.parse(row.timing)
            floor = row_floor(
                costs[row.op, row.problem],
                here.device or "cpu",
                row.us,
                captured=not mode.eager,
                hot=mode.hot,
            )
            row.floor = floor.fields(row.us)


def _groups(cases: Sequence[Case], here: Place) -> list[list[Case]]:
    """Cases in order, split so that the argument lists of a group stay within MEMORY."""
    from gristmill.autotune.timing import cold_bytes

    device = here.device or "cpu"
    limit = CPU_MEMORY if device == "cpu" else GPU_MEMORY
    groups: list[list[Case]] = []
    room = 0
    for case in cases:
        # Lists take the cold budget, or twice the bytes of a call if that is more; each weight layout has its own.
        need = max(cold_bytes(device), 4 * case.op.cost(case.problem).bytes) * (
            2 if case.op.pack is None else 1 + len(case.others)
        )
        if not groups or need > room:
            groups.append([])
            room = limit
        groups[-1].append(case)
        room -= need
    return groups


def _candidates(case: Case, here: Place, hot: bool) -> tuple[list[Any], list[Row]]:
    """The candidates that can run, the baseline and its twin first; and rows for kernels that cannot run or are wrong."""
    from gristmill.autotune.candidate import Candidate, WrongResultError, shared_rotations
    from gristmill.autotune.errors import UnverifiableError

    device = here.device or "cpu"
    rows, candidates = [], []
    kernels = [case.baseline, *case.others]
    gaps = {kernel.name: here.why_not(kernel, case.problem) for kernel in kernels}
    able = [kernel for kernel in kernels if not gaps[kernel.name]]
    rows += [_failed(case, kernel, GAP, gaps[kernel.name]) for kernel in case.others if gaps[kernel.name]]
    if gaps[case.baseline.name]:
        reason = f"the baseline cannot run: {gaps[case.baseline.name]}"
        return [], rows + [
            _failed(case, kernel, GAP, reason) for kernel in case.others if not gaps[kernel.name]
        ]
    try:
        rotations = shared_rotations(case.op, case.problem, device, able, hot=hot)
    except UnverifiableError as error:
        return [], rows + [
            _failed(case, kernel, GAP, str(error)) for kernel in able if kernel is not case.baseline
        ]
    for kernel in able:
        config = kernel.config(case.problem, here.target)
        names = (kernel.name, kernel.name + TWIN) if kernel is case.baseline else (kernel.name,)
        try:
            if wrong := verified(case.op, kernel, config, case.problem, device):
                raise WrongResultError(wrong)
            candidates += [
                Watched(Candidate(kernel, config, rotations[kernel.name], name=name)) for name in names
            ]
        except (WrongResultError, UnverifiableError) as error:
            verdict = WRONG if isinstance(error, WrongResultError) else GAP
            rows.append(_failed(case, kernel, verdict, str(error)))
            if kernel is case.baseline:
                why = f"the baseline {'is wrong' if verdict == WRONG else 'cannot be tried'}: {error}"
                return [], rows + [_failed(case, other, GAP, why) for other in able if other is not kernel]
    return candidates, rows


def verified(op: Op, kernel: Kernel, config: Config, problem: Problem, device: str) -> str:
    """Verify in a child process, which isolates faults. Returns "" or what was wrong; UnverifiableError if it cannot be decided."""
    from gristmill.autotune.errors import UnverifiableError
    from gristmill.autotune.worker import shared_workers
    from gristmill.kernel_registry.registry import default_registry

    if kernel not in default_registry().kernels_of(op.name):
        return ""  # a kernel outside the registry cannot be found by another process; audits still check it
    with shared_workers().one() as worker:
        outcome = worker.verify(op, kernel, config, op.verification(problem, kernel, config), device)
    if not outcome["judged"]:
        raise UnverifiableError(str(outcome["reason"]))
    return "" if outcome["ok"] else str(outcome["reason"])


class Watched:
    """A candidate that is no longer timed once an audit finds it wrong. The others continue; its time is that of its last sample."""

    def __init__(self, candidate: Any) -> None:
        self.candidate, self.name, self.wrong = candidate, candidate.name, ""
        self.times: list[float] = []

    def sample(self) -> float:
        return float(
            self.candidate.samples[-1] if self.wrong and self.candidate.samples else self.candidate.sample()
        )

    def audit(self, last: bool = False) -> None:
        from gristmill.autotune.candidate import WrongResultError

        if self.wrong:
            return
        try:
            (self.candidate.conclude if last else self.candidate.audit)()
        except WrongResultError as error:
            self.wrong = str(error)


def auditor(candidates: Sequence[Watched], rng: random.Random) -> Callable[[], None]:
    """The function to call between rounds: it audits a candidate at random, each about twice in the first sixteen rounds."""

    def between() -> None:
        if rng.random() < len(candidates) / 8:
            rng.choice(candidates).audit()

    return between


@dataclass
class _Raced:
    """A candidate after its race, with its samples and the outcome of its audits; the `twin` is the baseline's second candidate."""

    case: Case
    row: Row
    logs: list[float]
    twin: bool
    wrong: str


def _finish(case: Case, timed: Rounds) -> list[_Raced]:
    candidates = cast(list[Watched], timed.candidates)
    for candidate in candidates:
        candidate.audit(last=True)
    first, twin, *_ = candidates
    base = tuple(timed.kept(first.name))
    spoilt = next((f"the baseline is wrong: {a.wrong}" for a in (first, twin) if a.wrong), "")
    raced = []
    for candidate in candidates[1:]:
        times, kernel = tuple(timed.kept(candidate.name)), candidate.candidate.kernel
        row = Row(
            case.op.name,
            str(case.problem),
            kernel.name,
            case.baseline.name,
            UNCLEAR,
            us=statistics.median(times),
            baseline_us=statistics.median(base),
            error=candidate.candidate.error,
            tolerance=case.op.tolerance(case.problem).limit,
            timing=candidate.candidate.timing,
            config=candidate.candidate.config,
            samples=times,
            baseline_samples=base,
        )
        raced.append(
            _Raced(case, row, timed.logs(candidate.name), candidate is twin, candidate.wrong or spoilt)
        )
    return raced


def _settle(raced: _Raced, verdict: Verdict, twin_verdict: Verdict, rule: Rule) -> Row:
    row = raced.row
    row.noise = max(twin_verdict.ratio, 1 / twin_verdict.ratio) - 1
    if raced.wrong:
        row.verdict, row.reason, row.us = WRONG, raced.wrong, None
        return row
    row.comparison, row.verdict, row.reason = verdict, verdict.verdict, verdict.reason
    if twin_verdict.verdict not in (SAME, UNCLEAR) or row.noise > rule.min_effect:
        row.verdict = UNCLEAR
        row.reason = f"the baseline differs from itself by {row.noise:.1%}, which is more than the smallest effect of {rule.min_effect:.1%}"
    return row


def _failed(case: Case, kernel: Kernel, verdict: str, reason: str) -> Row:
    return Row(
        case.op.name,
        str(case.problem),
        kernel.name,
        case.baseline.name,
        verdict,
        reason,
        tolerance=case.op.tolerance(case.problem).limit,
    )
