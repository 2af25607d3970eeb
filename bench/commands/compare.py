"""kernelbench compare: which kernel is faster, if the samples are conclusive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gristmill import console
from gristmill.autotune.place import Place, imported, place
from gristmill.bench.finite import Finite
from gristmill.bench.model_options import model_calls, model_options
from gristmill.bench.out_file import OutFile
from gristmill.bench.peers import unwrapped
from gristmill.bench.problems import baseline_of, chosen, here_or_refuse, named, problem_options, workloads
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.op import Op


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
@click.option(
    "--min-effect",
    type=Finite(0, 1, min_open=True, max_open=True),
    default=0.03,
    show_default=True,
    help="The smallest relative change that gets a verdict.",
)
@click.option(
    "--hot", is_flag=True, help="Arguments stay in the cache. Default: every call reads them from memory."
)
@click.option(
    "--seconds",
    type=Finite(0.1),
    default=30.0,
    show_default=True,
    help="A problem gets no more rounds after this time.",
)
@click.option("--target", metavar="T", help="A device of this machine, or a CPU level such as cpu:avx2.")
@click.option("--results", type=OutFile(), metavar="FILE", help="Write a result file with samples.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
@click.pass_context
def compare(
    context: click.Context,
    op_name: str | None,
    problem_texts: tuple[str, ...],
    suite: str | None,
    model: str | None,
    tp: int,
    weights: str | None,
    mix: tuple[str, ...],
    decode: tuple[str, ...],
    prefill: tuple[str, ...],
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
    from gristmill.bench.compare import GAP, WRONG, Case, Row, add_floors
    from gristmill.bench.compare import compare as run
    from gristmill.bench.result_file import write
    from gristmill.bench.statistics.verdict import Rule

    here = place(target)
    here_or_refuse(here)
    work = workloads(op_name, problem_texts, suite, model_calls(model, tp, weights, decode, prefill, mix))
    ops = [*dict.fromkeys(one.op for one in work)]
    others = chosen(ops, kernels, here)
    here = imported(
        here, [k for op in ops for k in (*others[op.name], *(named(op, baseline) if baseline else ()))]
    )
    cases = []
    for one in work:
        first = (
            baseline_of(one.op, one.problem, baseline, here)
            if baseline
            else _selected(one.op, one.problem, here)
        )
        cases.append(
            Case(one.op, one.problem, first, tuple(k for k in others[one.op.name] if k.name != first.name))
        )
    if not any(case.others for case in cases):
        raise click.UsageError(
            f"nothing to compare {cases[0].baseline.name} with; name kernels with --kernels"
        )
    limits = ceilings(
        here.device or "cpu"
    )  # measured first: damaged files are refused early, and nothing disturbs new measurements
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
        write(
            results,
            here,
            [
                row.as_dict() | {"samples": row.samples, "baseline_samples": row.baseline_samples}
                for row in rows
            ],
            ceilings=limits.as_dict(),
        )
    if as_json:
        console.emit([row.as_dict() for row in rows])
    else:
        console.table(
            f"{', '.join(dict.fromkeys(case.op.name for case in cases))} on {here.target.name} {here.target.device}",
            [
                "operation",
                "problem",
                "kernel",
                "baseline",
                "verdict",
                "µs",
                "baseline µs",
                "ratio",
                "interval",
                "noise",
                "of floor",
                "error",
                "reason",
            ],
            [
                [
                    r.op,
                    r.problem,
                    r.kernel,
                    r.baseline,
                    r.verdict,
                    console.number(r.us),
                    console.number(r.baseline_us),
                    *_ratio(r.comparison),
                    _percent(r.noise),
                    _percent(r.floor["fraction_of_floor"]),
                    console.number(r.error),
                    "; ".join(filter(None, (r.reason, r.floor["note"]))),
                ]
                for r in rows
            ],
            right=("µs", "baseline µs", "ratio", "noise", "of floor", "error"),
        )
        gaps = sum(row.verdict == GAP for row in rows)
        if gaps:
            console.out().print(
                f"\n{gaps} row(s) are gaps: a kernel that cannot run here is named, never left out."
            )
    if any(row.verdict == WRONG for row in rows):
        context.exit(1)


def _selected(op: Op, problem: Any, here: Place) -> Kernel:
    """The kernel that selection runs here."""
    from gristmill.autotune.resolve import Resolver

    return Resolver(here.device or "cpu", here.policy).resolve(op, problem).require().kernel


def _ratio(verdict: Any) -> list[str]:
    return (
        ["-", "-"]
        if verdict is None
        else [f"{verdict.ratio:.3f}", f"{verdict.low:.3f} to {verdict.high:.3f}"]
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.1f} %"
