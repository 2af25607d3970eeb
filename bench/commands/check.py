"""kernelbench check: have kernels become slower or wrong since the baseline was written?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from gristmill import console
from gristmill.autotune.place import Place, imported, place
from gristmill.bench import options
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
    type=options.Finite(0, 1, min_open=True, max_open=True),
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
def check(
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
    here = place(target)
    here_or_refuse(here)
    output = _Output(file, here, junit, markdown, as_json)
    asked = _Entries(op_name, kernels, yardstick, problem_texts, portable)
    if instructions:
        if yardstick or portable:
            raise click.UsageError("--yardstick and --portable apply to ratios, not to counts")
        if update:
            code = _update_counts(output, asked)
        else:
            code = _check_counts(output, min_effect or COUNTED_EFFECT)
    elif update:
        code = _update(output, asked, min_effect or EFFECT, seconds)
    elif asked != _Entries():
        raise click.UsageError("--op, --kernels, --yardstick, --problem and --portable go with --update")
    else:
        code = _check(output, min_effect or EFFECT, seconds)
    click.get_current_context().exit(code)


@dataclass(frozen=True)
class _Entries:
    """The entries to write, from the options that go with --update."""

    op_name: str | None = None
    kernels: str | None = None
    yardstick: str | None = None
    problem_texts: tuple[str, ...] = ()
    portable: bool = False


@dataclass(frozen=True)
class _Output:
    """The baseline, the place that is compared with it, and where the outcome goes: stdout and the requested files."""

    file: Path
    here: Place
    junit: Path | None
    markdown: Path | None
    as_json: bool

    def tell(self, checked: Sequence[Checked | Counted], code: int, seconds: float) -> None:
        """Write the outcome."""
        from gristmill.bench import report_ci

        title = f"kernelbench check on {self.here.target.name}: {_MEANS[code]}"
        self._write(report_ci.junit(checked, seconds), report_ci.markdown(checked, title))
        if self.as_json:
            rows = [one.as_dict() for one in checked]
            console.emit({"exit": code, "meaning": _MEANS[code], "rows": rows})
            return
        console.table(
            f"{self.file} on {self.here.target.name}: {_MEANS[code]}",
            ["operation", "problem", "kernel", "verdict", "change", "now", "reason"],
            [
                [
                    *(c.entry.op, c.entry.problem, c.entry.kernel, c.verdict),
                    "-" if c.change is None else f"{c.change - 1:+.1%}",
                    *(c.now, c.reason),
                ]
                for c in checked
            ],
            right=("change", "now"),
        )

    def stop(self, code: int, why: str) -> NoReturn:
        """Exit before the measurements; the requested files say why."""
        from gristmill.bench import report_ci

        self._write(report_ci.stopped(why), f"### kernelbench check: {_MEANS[code]}\n\n{why}\n")
        if self.as_json:
            console.emit({"exit": code, "meaning": _MEANS[code], "reason": why, "rows": []})
        else:
            console.err().print(f"kernelbench: {why}", soft_wrap=True)
        click.get_current_context().exit(code)

    def _write(self, junit: str, markdown: str) -> None:
        for path, text in ((self.junit, junit), (self.markdown, markdown)):
            if path is not None:
                replace(path, text)


_MEANS = {
    0: "nothing is slower",
    1: "something is slower",
    2: "a wrong result",
    3: "too noisy to say",
    4: "the environment differs",
    5: "there is no baseline",
}


def _update(output: _Output, asked: _Entries, min_effect: float, seconds: float) -> int:
    """Measure and write ratios: those of the file, or of the operation that was asked for."""
    from gristmill.bench import baseline
    from gristmill.bench.compare import Case, compare
    from gristmill.bench.statistics.verdict import Rule

    file, here, portable = output.file, output.here, asked.portable
    if why := unwritable(file):
        raise click.UsageError(why)
    dropped: dict[Any, str] = {}
    if asked.op_name is None:
        part, _ = baseline.find(baseline.read(file), here) if file.exists() else (None, "")
        if part is None or not part["entries"]:
            raise click.UsageError(
                f"{file} has no entries for this environment; add some with --op, --kernels and --yardstick"
            )
        dropped = baseline.gone(part["entries"])
        cases = baseline.cases([entry for entry in part["entries"] if entry not in dropped])
        portable = "device" not in part["environment"]
    else:
        if not asked.kernels or not asked.yardstick:
            raise click.UsageError("--op needs --kernels and --yardstick")
        op = default_registry().op(asked.op_name)
        against = default_registry().kernel(op.name, asked.yardstick)
        others = tuple(k for k in named(op, asked.kernels) if k.name != against.name)
        if not others:
            raise click.UsageError(
                f"--kernels {asked.kernels!r} names nothing but the yardstick: there is no ratio to write"
            )
        problems = concrete(op, asked.problem_texts or op.bench)
        cases = [Case(op, problem, against, others) for problem in problems]
    here = imported(here, [k for case in cases for k in (case.baseline, *case.others)])
    with console.status(quiet=output.as_json) as progress:
        rows = compare(cases, here, Rule(min_effect=min_effect), seconds=seconds, progress=progress)
    written = baseline.update(file, here, rows, portable, dropped)
    if output.as_json:
        console.emit([vars(entry) for entry in written])
    else:
        console.table(
            f"Baseline {file}",
            ["operation", "problem", "kernel", "yardstick", "ratio"],
            [[e.op, e.problem, e.kernel, e.yardstick, f"{e.ratio:.4f}"] for e in written],
            right=("ratio",),
        )
    lost = [row for row in rows if row.comparison is None]
    for row in lost:
        console.err().print(
            f"not written: {row.kernel} {row.problem}: {row.verdict}: {row.reason}", soft_wrap=True
        )
    for entry, why in dropped.items():
        console.err().print(f"dropped: {entry.kernel} {entry.problem}: {why}", soft_wrap=True)
    return baseline.BAD if lost else baseline.OK


def _check(output: _Output, min_effect: float, seconds: float) -> int:
    """Compare with the ratios of the file."""
    from gristmill.bench import baseline
    from gristmill.bench.compare import compare
    from gristmill.bench.statistics.verdict import Rule

    file, here, rule = output.file, output.here, Rule(min_effect=min_effect)
    if not file.exists():
        how = f"kernelbench check {file} --update --op OP ... writes it"
        output.stop(baseline.ABSENT, f"{file} does not exist; {how}")
    part, differs = baseline.find(baseline.read(file), here)
    if part is None:
        output.stop(baseline.ELSEWHERE, f"{file} was not written in this environment: {differs}")
    entries = part["entries"]
    if not entries:
        output.stop(baseline.ABSENT, f"{file} holds no lines for this environment")
    begin = time.perf_counter()
    missing = baseline.gone(entries)
    cases = baseline.cases([entry for entry in entries if entry not in missing])
    here = imported(here, [k for case in cases for k in (case.baseline, *case.others)])
    with console.status(quiet=output.as_json) as progress:
        rows = compare(cases, here, rule, seconds=seconds, shift=baseline.shifts(entries), progress=progress)
    checked = baseline.against(entries, rows, rule, missing)
    code = baseline.exit_code(checked)
    output.tell(checked, code, time.perf_counter() - begin)
    return code


def _update_counts(output: _Output, asked: _Entries) -> int:
    """Count and write instructions: those of the file, or of the operation that was asked for."""
    from gristmill.bench import baseline, count_baseline, counts

    file, here = output.file, output.here
    if gap := counts.missing(here):
        raise click.UsageError(gap)
    if asked.op_name is None:
        entries, differs = (
            count_baseline.find(file, here) if file.exists() else (None, "there is no such file")
        )
        if entries is None:
            raise click.UsageError(
                f"{file} has no lines for this environment ({differs}); name some with --op and --kernels"
            )
        work = count_baseline.work(entries)
    else:
        if not asked.kernels:
            raise click.UsageError("--op needs --kernels")
        op = default_registry().op(asked.op_name)
        problems = concrete(op, asked.problem_texts or op.bench)
        work = [(op, kernel, problem) for problem in problems for kernel in named(op, asked.kernels)]
    measured = count_baseline.measure(work, here)
    written = count_baseline.update(file, here, work, measured)
    if output.as_json:
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


def _check_counts(output: _Output, min_effect: float) -> int:
    """Compare with the counts of the file."""
    from gristmill.bench import baseline, count_baseline

    file, here = output.file, output.here
    if not file.exists():
        how = f"kernelbench check {file} --instructions --update --op OP ... writes it"
        output.stop(baseline.ABSENT, f"{file} does not exist; {how}")
    entries, differs = count_baseline.find(file, here)
    if entries is None:
        output.stop(baseline.ELSEWHERE, f"{file} is a baseline of another environment: {differs}")
    if not entries:
        output.stop(baseline.ABSENT, f"{file} holds no lines for this environment")
    begin = time.perf_counter()
    measured = count_baseline.measure(count_baseline.work(entries), here)
    checked = count_baseline.against(entries, measured, min_effect)
    code = count_baseline.exit_code(checked)
    output.tell(checked, code, time.perf_counter() - begin)
    return code
