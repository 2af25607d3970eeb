"""Run kernels on their examples in one process, for compute-sanitizer, which slows everything that it watches.

    compute-sanitizer --tool memcheck --target-processes all python -m lab.sanitized --kernels "*_sm80,*_sm75" --out memcheck.json
    compute-sanitizer --tool racecheck --kernel-name kernel_substring=gemm python -m lab.sanitized --kernels "linear_*_sm80"

Every example is verified as by ``kernelbench prove``: poisoned outputs, guard bands, unchanged arguments. ``--part 2/8`` takes the second of
eight parts, for processes beside each other. What the sanitizer reports is on its own output; exit status 1 if a result is wrong.
"""

from __future__ import annotations

import sys
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import click

from gristmill.autotune.environment import environment
from gristmill.autotune.place import Place
from gristmill.autotune.verify import verify
from gristmill.bench.examples import Example, examples
from lab.result import write_result


def chosen(patterns: str, part: str, target: str | None) -> tuple[Place, list[Example]]:
    """The device, and the part ``i/n`` of the examples of kernels whose names match one of the patterns; none of several ranks."""
    number, count = (int(text) for text in part.split("/"))
    if not 1 <= number <= count:
        raise click.UsageError(f"--part takes i/n with 1 <= i <= n, got {part!r}")
    here, runs, _ = examples(target, None, None)
    globs = patterns.split(",")
    fitting = [
        run
        for run in runs
        if any(fnmatch(run.kernel.name, glob) for glob in globs) and run.op.world(run.problem) == 1
    ]
    if not fitting:
        raise click.UsageError(f"no kernel that runs on {here.target.name} matches {patterns!r}")
    return here, fitting[number - 1 :: count]


@click.command()
@click.option("--kernels", required=True, metavar="GLOB,...", help="Names of kernels.")
@click.option("--part", default="1/1", show_default=True, metavar="I/N", help="A part of the examples.")
@click.option("--target", help="A device of this machine. Default: the first GPU.")
@click.option("--seconds", type=float, default=600.0, show_default=True, help="No example begins later.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the rows to this JSON file.")
def main(kernels: str, part: str, target: str | None, seconds: float, out: Path | None) -> None:
    """Run kernels on their examples, in this process."""
    here, runs = chosen(kernels, part, target)
    begin, rows = time.monotonic(), list[dict[str, Any]]()
    for run in runs:
        row: dict[str, Any] = {"kernel": run.kernel.name, "problem": str(run.problem)}
        if time.monotonic() - begin > seconds:
            rows.append({**row, "ok": None, "reason": "no time was left"})
            continue
        outcome = verify(run.op, run.kernel, run.config, run.problem, here.device or "cpu")
        rows.append({**row, "ok": outcome.ok, "reason": outcome.reason})
        print(rows[-1], flush=True)
    if out is not None:
        command = f"compute-sanitizer python -m lab.sanitized --kernels '{kernels}' --part {part}"
        write_result(out, {"about": environment(here.target, command), "rows": rows})
    if any(row["ok"] is False for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
