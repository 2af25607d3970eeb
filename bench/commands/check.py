"""kernelbench check: have kernels become slower or wrong since the baseline was written?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from gristmill import console
from gristmill.autotune.place import Place, imported, place
from gristmill.bench import options
from gristmill.bench.finite import Finite
from gristmill.bench.out_file import OutFile, unwritable
from gristmill.bench.problems import concrete, here_or_refuse, named
from gristmill.bench.result_file import replace
from gristmill.kernel_registry.registry import default_registry

if TYPE_CHECKING:
    from gristmill.bench.baseline import Checked
    from gristmill.bench.count_baseline import Counted

EFFECT, COUNTED_EFFECT = 0.05, 0.02
"""The smallest relative slowdown that counts, of times and of instructions."""


@click.command()
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
@click.option(
    "--update",
    is_flag=True,
    help="Measure and write the baseline: the entries of FILE, or those of --op.",
)
@click.option("--op", "op_name", metavar="OP", help="With --update: add entries for this operation.")
@click.option("--kernels", metavar="A,B", help="With --op: for these kernels.")
@click.option(
    "--yardstick",
    metavar="K",
    help="With --op: the kernel that ratios refer to, timed alternately with the others.",
)
@click.option(
    "--problem", "problem_texts", metavar="P", multiple=True, help="With --op: for this problem; repeatable."
)
@click.option(
    "--instructions",
    is_flag=True,
    help="Count instructions of C++ CPU kernels with valgrind instead of timing them: exact also on a busy machine; "
    "entries belong to a compiler and a level.",
)
@click.option(
    "--portable",
    is_flag=True,
    help="With --op: the entries hold on any device of this target, not only on this one.",
)
@click.option(
    "--min-effect",
    type=Finite(0, 1, min_open=True, max_open=True),
    show_default="0.05; 0.02 of instructions",
    help="The smallest relative slowdown that counts.",
)
@options.seconds
@options.target
@click.option("--junit", type=OutFile(), metavar="FILE", help="Write JUnit XML.")
@click.option(
    "--markdown", type=OutFile(), metavar="FILE", help="Write a Markdown summary, for a pull request."
)
@options.as_json
@click.pass_context
def check(
    context: click.Context,
    file: Path,
    update: bool,
    op_name: str | None,
    kernels: str | None,
    yardstick: str | None,
    problem_texts: tuple[str, ...],
    instructions: bool,
    portable: bool,
    min_effect: float | None,
    seconds: float,
    target: str | None,
    junit: Path | None,
    markdown: Path | None,
    as_json: bool,
) -> None:
    """Compare kernels with the baseline in FILE: ratios to a yardstick kernel timed alternately with them, which are valid on
    busy machines. Results are checked before, during and after timing.

    \b
    kernelbench check base.json --update --op rms_norm --kernels rms_norm_cpu --yardstick rms_norm_torch
    kernelbench check base.json --junit report.xml --markdown summary.md
    kernelbench check counts.json --instructions --target cpu:avx2

    \b
    Exit status
      0  nothing is slower         1  something is slower        2  a wrong result, or an invalid command
      3  too noisy to say          4  the environment differs    5  there is no baseline
    An entry whose kernel cannot run here, or no longer exists, is 4 too. A bug exits with 70, an interrupt with 130.
    """
    from gristmill.bench import baseline
    from gristmill.bench.compare import Case, compare
    from gristmill.bench.statistics.verdict import Rule

    here = place(target)
    here_or_refuse(here)
    if instructions:
        if yardstick or portable:
            raise click.UsageError("--yardstick and --portable apply to ratios, not to counts")
        effect = min_effect or COUNTED_EFFECT
        code = (
            _update_counts(file, here, op_name, kernels, problem_texts, as_json)
            if update
            else _check_counts(context, file, here, effect, junit, markdown, as_json)
        )
        context.exit(code)
    rule = Rule(min_effect=min_effect or EFFECT)
    if update:
        if why := unwritable(file):
            raise click.UsageError(why)
        cases: list[Case] = []
        dropped: dict[Any, str] = {}
        if op_name is None:
            part, _ = baseline.find(baseline.read(file), here) if file.exists() else (None, "")
            if part is None or not part["entries"]:
                raise click.UsageError(
                    f"{file} has no entries for this environment; add some with --op, --kernels and --yardstick"
                )
            dropped = baseline.gone(part["entries"])
            cases, portable = (
                baseline.cases([e for e in part["entries"] if e not in dropped]),
                "device" not in part["environment"],
            )
        else:
            if not kernels or not yardstick:
                raise click.UsageError("--op needs --kernels and --yardstick")
            op = default_registry().op(op_name)
            against = default_registry().kernel(op.name, yardstick)
            others = tuple(k for k in named(op, kernels) if k.name != against.name)
            if not others:
                raise click.UsageError(
                    f"--kernels {kernels!r} names nothing but the yardstick: there is no ratio to write"
                )
            cases = [
                Case(op, problem, against, others) for problem in concrete(op, problem_texts or op.bench)
            ]
        here = imported(here, [k for case in cases for k in (case.baseline, *case.others)])
        with console.status(quiet=as_json) as progress:
            rows = compare(cases, here, rule, seconds=seconds, progress=progress)
        written = baseline.update(file, here, rows, portable, dropped)
        lost = [row for row in rows if row.comparison is None]
        if as_json:
            console.emit([vars(entry) for entry in written])
        else:
            console.table(
                f"Baseline {file}",
                ["operation", "problem", "kernel", "yardstick", "ratio"],
                [[e.op, e.problem, e.kernel, e.yardstick, f"{e.ratio:.4f}"] for e in written],
                right=("ratio",),
            )
        for row in lost:
            console.err().print(
                f"not written: {row.kernel} {row.problem}: {row.verdict}: {row.reason}", soft_wrap=True
            )
        for entry, why in dropped.items():
            console.err().print(f"dropped: {entry.kernel} {entry.problem}: {why}", soft_wrap=True)
        context.exit(baseline.BAD if lost else baseline.OK)
    if op_name or kernels or yardstick or problem_texts or portable:
        raise click.UsageError("--op, --kernels, --yardstick, --problem and --portable go with --update")
    if not file.exists():
        _stop(
            context,
            baseline.ABSENT,
            f"{file} does not exist; kernelbench check {file} --update --op OP ... writes it",
            junit,
            markdown,
            as_json,
        )
    part, differs = baseline.find(baseline.read(file), here)
    entries = part["entries"] if part else []
    if part is None:
        _stop(
            context,
            baseline.ELSEWHERE,
            f"{file} was not written in this environment: {differs}",
            junit,
            markdown,
            as_json,
        )
    if not entries:
        _stop(
            context, baseline.ABSENT, f"{file} holds no lines for this environment", junit, markdown, as_json
        )
    begin = time.perf_counter()
    missing = baseline.gone(entries)
    cases = baseline.cases([entry for entry in entries if entry not in missing])
    here = imported(here, [k for case in cases for k in (case.baseline, *case.others)])
    with console.status(quiet=as_json) as progress:
        rows = compare(cases, here, rule, seconds=seconds, shift=baseline.shifts(entries), progress=progress)
    checked = baseline.against(entries, rows, rule, missing)
    code = baseline.exit_code(checked)
    _tell(file, here, checked, code, time.perf_counter() - begin, junit, markdown, as_json)
    context.exit(code)


def _update_counts(
    file: Path,
    here: Place,
    op_name: str | None,
    kernels: str | None,
    problem_texts: tuple[str, ...],
    as_json: bool,
) -> int:
    from gristmill.bench import baseline, count_baseline, counts

    if gap := counts.missing(here):
        raise click.UsageError(gap)
    if op_name is None:
        entries, differs = (
            count_baseline.find(file, here) if file.exists() else (None, "there is no such file")
        )
        if entries is None:
            raise click.UsageError(
                f"{file} has no lines for this environment ({differs}); name some with --op and --kernels"
            )
        work = count_baseline.work(entries)
    else:
        if not kernels:
            raise click.UsageError("--op needs --kernels")
        op = default_registry().op(op_name)
        work = [
            (op, kernel, problem)
            for problem in concrete(op, problem_texts or op.bench)
            for kernel in named(op, kernels)
        ]
    measured = count_baseline.measure(work, here)
    written = count_baseline.update(file, here, work, measured)
    if as_json:
        console.emit([vars(entry) for entry in written])
    else:
        console.table(
            f"Baseline {file}",
            ["operation", "problem", "kernel", "instructions"],
            [[e.op, e.problem, e.kernel, f"{e.instructions:,}"] for e in written],
            right=("instructions",),
        )
        for (_, kernel, problem), (wrong, _) in zip(work, measured, strict=True):
            if wrong:
                console.out().print(f"not written: {kernel.name} {problem}: {wrong}")
    return baseline.OK if len(written) == len(work) else baseline.BAD


def _check_counts(
    context: click.Context,
    file: Path,
    here: Place,
    min_effect: float,
    junit: Path | None,
    markdown: Path | None,
    as_json: bool,
) -> int:
    from gristmill.bench import baseline, count_baseline

    if not file.exists():
        why = f"{file} does not exist; kernelbench check {file} --instructions --update --op OP ... writes it"
        _stop(context, baseline.ABSENT, why, junit, markdown, as_json)
    entries, differs = count_baseline.find(file, here)
    if entries is None:
        _stop(
            context,
            baseline.ELSEWHERE,
            f"{file} is a baseline of another environment: {differs}",
            junit,
            markdown,
            as_json,
        )
    if not entries:
        _stop(
            context, baseline.ABSENT, f"{file} holds no lines for this environment", junit, markdown, as_json
        )
    begin = time.perf_counter()
    checked = count_baseline.against(
        entries, count_baseline.measure(count_baseline.work(entries), here), min_effect
    )
    code = count_baseline.exit_code(checked)
    _tell(file, here, checked, code, time.perf_counter() - begin, junit, markdown, as_json)
    return code


def _tell(
    file: Path,
    here: Place,
    checked: Sequence[Checked | Counted],
    code: int,
    seconds: float,
    junit: Path | None,
    markdown: Path | None,
    as_json: bool,
) -> None:
    """Write the outcome to stdout and to the requested files."""
    from gristmill.bench import report_ci

    _write(junit, report_ci.junit(checked, seconds))
    _write(markdown, report_ci.markdown(checked, f"kernelbench check on {here.target.name}: {_MEANS[code]}"))
    if as_json:
        console.emit({"exit": code, "meaning": _MEANS[code], "rows": [one.as_dict() for one in checked]})
        return
    console.table(
        f"{file} on {here.target.name}: {_MEANS[code]}",
        ["operation", "problem", "kernel", "verdict", "change", "now", "reason"],
        [
            [
                c.entry.op,
                c.entry.problem,
                c.entry.kernel,
                c.verdict,
                "-" if c.change is None else f"{c.change - 1:+.1%}",
                c.now,
                c.reason,
            ]
            for c in checked
        ],
        right=("change", "now"),
    )


_MEANS = {
    0: "nothing is slower",
    1: "something is slower",
    2: "a wrong result",
    3: "too noisy to say",
    4: "the environment differs",
    5: "there is no baseline",
}


def _write(path: Path | None, text: str) -> None:
    if path is not None:
        replace(path, text)


def _stop(
    context: click.Context, code: int, why: str, junit: Path | None, markdown: Path | None, as_json: bool
) -> NoReturn:
    """Stop before the measurements; the requested files say why."""
    from gristmill.bench import report_ci

    _write(junit, report_ci.stopped(why))
    _write(markdown, f"### kernelbench check: {_MEANS[code]}\n\n{why}\n")
    if as_json:
        console.emit({"exit": code, "meaning": _MEANS[code], "reason": why, "rows": []})
    else:
        console.err().print(f"kernelbench: {why}", soft_wrap=True)
    context.exit(code)
