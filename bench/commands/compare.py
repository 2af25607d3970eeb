"""kernelbench compare: which kernel is faster, if the samples are conclusive."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gristmill import console
from gristmill.autotune.place import Place, imported, place
from gristmill.bench import options
from gristmill.bench.model_options import ModelOptions, model_options
from gristmill.bench.peers import unwrapped
from gristmill.bench.problems import (
    Asked,
    Workload,
    baseline_of,
    chosen,
    here_or_refuse,
    named,
    problem_options,
)
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem

if TYPE_CHECKING:
    from gristmill.bench.compare import Case


@click.command()
@problem_options
@model_options
@click.option(
    "--baseline",
    metavar="K",
    help="The kernel to compare with; a pattern such as *_torch selects one per "
    "problem. Default: the one that selection would run.",
)
@click.option(
    "--kernels",
    metavar="A,B",
    help="The others; patterns such as *_cpu are allowed. Default: all that can run here.",
)
@options.min_effect(0.03, "The smallest relative change that gets a verdict.")
@options.hot
@options.seconds
@options.target
@options.results()
@options.as_json
@click.pass_context
def compare(
    context: click.Context,
    asked: Asked,
    of_model: ModelOptions,
    baseline: str | None,
    kernels: str | None,
    min_effect: float,
    seconds: float,
    hot: bool,
    target: str | None,
    results: Path | None,
    as_json: bool,
) -> None:
    """Compare kernels of OP, of a suite, or of the calls of a model, with a baseline. Kernels alternate over the same data, in
    a new random order each round.

    \b
    kernelbench compare rms_norm --baseline rms_norm_torch
    kernelbench compare --model llama-3-8b --weights int4_g128 --mix decode --baseline "*_torch"

    \b
    FASTER, SLOWER   by more than the minimum effect, with a false discovery rate of 5 % over all rows
    SAME             the interval lies within the minimum effect
    UNCLEAR          neither, after up to eight times the rounds; or the machine is too noisy for the minimum effect
    WRONG            a wrong result, or a cheat: kernels are checked before, during and after timing
    GAP              it cannot run here, with the reason

    \b
    ratio        kernel over baseline, with its interval: 0.8 = a fifth less time
    noise        the measured difference of the baseline from itself, timed twice in the same rounds
    of floor     the floor over the kernel's time, as in kernelbench bench: 100 % = no kernel can be faster

    Exit status 0; 1 if a kernel was WRONG.
    """
    from gristmill.autotune.floor import ceilings
    from gristmill.bench.compare import GAP, WRONG, Row, add_floors
    from gristmill.bench.compare import compare as run
    from gristmill.bench.result_file import write
    from gristmill.bench.statistics.verdict import Rule

    here = place(target)
    here_or_refuse(here)
    work = asked.workloads(of_model.calls())
    cases, here = _cases(work, baseline, kernels, here)
    # Measured first: damaged files are refused early, and nothing disturbs new measurements.
    limits = ceilings(here.device or "cpu")
    with console.status(quiet=as_json) as progress:
        rows = run(cases, here, Rule(min_effect=min_effect), hot=hot, seconds=seconds, progress=progress)
        progress("floors")
        add_floors(rows, cases, here)
    if kernels is None:
        rows += [
            Row(one.op.name, str(one.problem), name, case.baseline.name, GAP, why)
            for one, case in zip(work, cases, strict=True)
            for name, why in unwrapped(one.op, here).items()
        ]
    if results:
        with_samples = [
            row.as_dict() | {"samples": row.samples, "baseline_samples": row.baseline_samples} for row in rows
        ]
        write(results, here, with_samples, ceilings=limits.as_dict())
    if as_json:
        console.emit([row.as_dict() for row in rows])
    else:
        ops = ", ".join(dict.fromkeys(case.op.name for case in cases))
        console.table_of(
            f"{ops} on {here.target.name} {here.target.device}",
            [row.as_dict() for row in rows],
            {
                "operation": "op",
                **{name: name for name in ("problem", "kernel", "baseline", "verdict")},
                "µs": "us",
                "baseline µs": "baseline_us",
                "ratio": lambda r: "-" if r["ratio"] is None else f"{r['ratio']:.3f}",
                "interval": lambda r: "-" if r["low"] is None else f"{r['low']:.3f} to {r['high']:.3f}",
                "noise": lambda r: _percent(r["noise"]),
                "of floor": lambda r: _percent(r["fraction_of_floor"]),
                "error": "error",
                "reason": lambda r: "; ".join(filter(None, (r["reason"], r["note"]))),
            },
            right=("µs", "baseline µs", "ratio", "noise", "of floor", "error"),
        )
        if gaps := sum(row.verdict == GAP for row in rows):
            console.out().print(
                f"\n{gaps} row(s) are gaps: a kernel that cannot run here is named, never left out."
            )
    if any(row.verdict == WRONG for row in rows):
        context.exit(1)


def _cases(
    work: Sequence[Workload], baseline: str | None, kernels: str | None, here: Place
) -> tuple[list[Case], Place]:
    """The kernels to compare on each problem, and `here` with what they import."""
    from gristmill.bench.compare import Case

    ops = [*dict.fromkeys(one.op for one in work)]
    others = chosen(ops, kernels, here)
    named_too = {op.name: named(op, baseline) if baseline else [] for op in ops}
    here = imported(here, [k for op in ops for k in (*others[op.name], *named_too[op.name])])
    cases = []
    for one in work:
        first = (
            baseline_of(one.op, one.problem, baseline, here)
            if baseline
            else _selected(one.op, one.problem, here)
        )
        against = tuple(k for k in others[one.op.name] if k.name != first.name)
        cases.append(Case(one.op, one.problem, first, against))
    if not any(case.others for case in cases):
        raise click.UsageError(
            f"nothing to compare {cases[0].baseline.name} with; name kernels with --kernels"
        )
    return cases, here


def _selected(op: Op, problem: Problem, here: Place) -> Kernel:
    """The kernel that selection runs here."""
    from gristmill.autotune.resolve import Resolver

    return Resolver(here.device or "cpu", here.policy).resolve(op, problem).require().kernel


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.1f} %"
