"""The times of kernels on a problem: cold and hot, captured and eager, interleaved and audited.

`kernelbench bench` uses it. Candidates are those that `compare` and `tune` race (`gristmill.autotune.candidate`), so there is one method of
timing; here nothing is judged.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.autotune.errors import UnverifiableError
from gristmill.autotune.gpu_clock import sm_clock
from gristmill.autotune.place import Place
from gristmill.autotune.rounds import Rounds
from gristmill.bench.compare import WRONG, Watched, auditor, verified
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem

TIMINGS = ("graph,cold", "graph,hot", "eager,cold", "eager,hot", "graph,cold,isolated", "eager,cold,isolated")
"""Timing modes, those of deployment first: the first mode that a kernel supports is its time. Calls are back to back, or isolated:
the input of each depends on the output of the previous one."""

LEAST, MOST = 5, 64
"""Rounds."""


def kernel_rows(
    op: Op,
    problem: Problem,
    kernels: Sequence[Kernel],
    here: Place,
    *,
    baseline: Kernel | None = None,
    seconds: float = 0.5,
    all_timings: bool = True,
    seed: int = 0,
    configs: Mapping[str, Config] | None = None,
) -> list[dict[str, Any]]:
    """A row for each kernel; one that cannot run or is wrong has a reason instead of a time.

    Args:
        configs: by kernel, if not the default one.
        baseline: the kernel that speedups refer to, timed in the same rounds.
        seconds: per kernel, for all its timing modes.
        all_timings: False for the first of TIMINGS only.
    """
    rows = {kernel.name: _empty(op, problem, kernel.name) for kernel in kernels}
    candidates: dict[str, dict[str, Watched]] = {}
    held = [*kernels, *([baseline] if baseline and baseline.name not in rows else [])]
    for kernel in held:
        row = rows.setdefault(kernel.name, _empty(op, problem, kernel.name))
        override = (configs or {}).get(kernel.name)
        config = (
            None
            if here.why_not(kernel, problem)
            else dict(kernel.config(problem, here.target) if override is None else override)
        )
        row["config"] = config
        row["reason"] = here.why_not(kernel, problem)
        if config is not None:
            _verify(row, op, kernel, problem, here)
    fit = [kernel for kernel in held if not rows[kernel.name]["reason"]]
    try:
        for kernel, timing, candidate, wrong in _candidates(op, problem, fit, rows, here, all_timings):
            if candidate is None:
                rows[kernel.name] |= {"reason": f"{WRONG}: {wrong}", "wrong": True}
            else:
                candidates.setdefault(kernel.name, {})[timing] = Watched(candidate)
    except UnverifiableError as error:
        for kernel in fit:
            rows[kernel.name]["reason"] = rows[kernel.name]["reason"] or str(error)
        fit, candidates = [], {}
    racing = [watched for own in candidates.values() for watched in own.values()]
    if racing:
        discarded = _race(racing, seconds * len(candidates), seed, here.device or "cpu")
        for kernel in fit:
            rows[kernel.name]["discarded"] = discarded
    for kernel in fit:
        _fill(rows[kernel.name], op, problem, here, candidates.get(kernel.name, {}))
    if baseline is not None:
        _hold(rows, baseline.name)
    return [rows[kernel.name] for kernel in held]


def _verify(row: dict[str, Any], op: Op, kernel: Kernel, problem: Problem, here: Place) -> None:
    try:
        wrong = verified(op, kernel, row["config"], problem, here.device or "cpu")
    except UnverifiableError as error:
        row["reason"] = f"not timed: {error}"
    else:
        row |= {"reason": f"{WRONG}: {wrong}", "wrong": True} if wrong else {}


def gap_row(op: Op, problem: Problem, name: str, reason: str) -> dict[str, Any]:
    """The row of a kernel without a time here, with the reason."""
    return _empty(op, problem, name) | {"reason": reason}


def _empty(op: Op, problem: Problem, name: str) -> dict[str, Any]:
    return {
        "op": op.name,
        "problem": str(problem),
        "kernel": name,
        "us": None,
        "spread": None,
        "timing": None,
        "times": {},
        "gbs": None,
        "tflops": None,
        "fraction_of_floor": None,
        "floor_us": None,
        "floor_source": None,
        "bound": None,
        "error": None,
        "tolerance": op.tolerance(problem).limit,
        "baseline": None,
        "speedup": None,
        "discarded": 0,
        "reason": "",
        "wrong": False,
        "note": "",
        "config": None,
        "samples": (),
    }


def _candidates(
    op: Op, problem: Problem, kernels: Sequence[Kernel], rows: dict[str, Any], here: Place, all_timings: bool
) -> Any:
    """(kernel, timing mode, candidate or None, what was wrong) for every kernel and mode."""
    from gristmill.autotune.candidate import Candidate, WrongResultError, shared_rotations

    device = here.device or "cpu"
    for hot in (False, True) if all_timings else (False,):
        rotations = shared_rotations(op, problem, device, kernels, hot=hot)
        for kernel in kernels:
            modes = [(False, False)]
            if all_timings and device != "cpu" and kernel.capturable:
                modes.append((True, False))
            if all_timings and not hot and not rotations[kernel.name].tied():
                modes.append((False, True))
            for eager, isolated in modes:
                if rows[kernel.name]["reason"]:
                    continue  # it was wrong in another timing mode
                try:
                    candidate = Candidate(
                        kernel,
                        rows[kernel.name]["config"],
                        rotations[kernel.name],
                        eager=eager,
                        isolated=isolated,
                    )
                except WrongResultError as error:
                    yield kernel, "", None, str(error)
                    continue
                candidate.name = f"{kernel.name} {candidate.timing}"
                yield kernel, candidate.timing, candidate, ""


def _race(candidates: Sequence[Watched], seconds: float, seed: int, device: str) -> int:
    """Time `candidates` in turn; returns the number of rounds that do not count because the device's clock differed."""
    rng = random.Random(seed)
    timed = Rounds(candidates, between=auditor(candidates, rng), clock=sm_clock(device))
    timed.run(LEAST, rng)
    while timed.seconds < seconds and timed.count < MOST:
        timed.run(2, rng)
    for candidate in candidates:
        candidate.times = timed.kept(candidate.name)
        candidate.audit(last=True)
    return timed.count - len(timed.steady)


def _fill(row: dict[str, Any], op: Op, problem: Problem, here: Place, own: dict[str, Watched]) -> None:
    from gristmill.autotune.candidate import LEAST_US, TimingMode
    from gristmill.autotune.floor import row_floor
    from gristmill.autotune.timing import summarize

    if wrong := next((watched.wrong for watched in own.values() if watched.wrong), ""):
        row |= {"reason": f"{WRONG}: {wrong}", "wrong": True}
    if row["reason"] or not own:
        return
    for timing in TIMINGS:
        if timing in own:
            measured = summarize(own[timing].times)
            if measured.us <= LEAST_US:
                continue  # lost in what ties the calls together: not measured
            row["times"][timing] = {"us": measured.us, "spread": measured.spread, "samples": measured.samples}
    timing = next(iter(row["times"]))
    mode, cost, us = TimingMode.parse(timing), op.cost(problem), row["times"][timing]["us"]
    row |= {
        "timing": timing,
        **row["times"][timing],
        "gbs": cost.bytes / us / 1e3,
        "tflops": cost.flops / us / 1e6,
        **row_floor(cost, here.device or "cpu", us, captured=not mode.eager, hot=mode.hot).fields(us),
        "error": max(watched.candidate.error for watched in own.values()),
    }


def _hold(rows: dict[str, dict[str, Any]], baseline: str) -> None:
    """Set the speedup of each row over the baseline: the median over rounds that timed both."""
    base = rows[baseline]
    for row in rows.values():
        row["baseline"] = baseline
        if row["us"] is None or base["us"] is None:
            continue
        pairs = zip(row["samples"], base["samples"], strict=True)
        row["speedup"] = math.exp(statistics.median(math.log(at / us) for us, at in pairs))
