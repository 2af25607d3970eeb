"""kernelbench rerun, repro, history: repeat the rows of result files, and their history."""

from __future__ import annotations

from pathlib import Path

import click

from gristmill import console
from gristmill.autotune.place import place
from gristmill.bench import options, result_file
from gristmill.bench.out_file import OutFile
from gristmill.bench.problems import here_or_refuse

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.argument("file", type=_FILE, metavar="FILE")
@options.min_effect(0.1, "The smallest relative difference that gets a verdict.")
@options.target
@click.option("--results", type=OutFile(), metavar="OUT", help="Write a result file of the present times.")
@options.as_json
@click.pass_context
def rerun(
    context: click.Context,
    file: Path,
    min_effect: float,
    target: str | None,
    results: Path | None,
    as_json: bool,
) -> None:
    """Measure every row of a result file again, here, and report differences in times, results and environment.

    NEW is a row that had no time and has one now; GAP is one that cannot be measured here. Old and new times were not taken
    alternately: on another or a busy machine, SLOWER may mean that the machine is slower. Exit status 1 if a row is WRONG.
    """
    from gristmill.bench.rerun import differences
    from gristmill.bench.rerun import rerun as run
    from gristmill.bench.statistics.verdict import Rule

    here = place(target)
    here_or_refuse(here)
    data = result_file.read(file)
    if not data["rows"]:
        raise result_file.ResultError(f"{file}: it has no rows; there is nothing to repeat")
    with console.status(quiet=as_json) as progress:
        repetitions = run(data, here, Rule(min_effect=min_effect, looks=1), progress=progress)
    rows, differs = [one.as_dict() for one in repetitions], differences(data, here)
    if results:
        result_file.write(results, here, [row | {"us": row["now_us"]} for row in rows])
    if as_json:
        console.emit({"environment": differs, "rows": rows})
    else:
        columns: dict[str, console.Cell] = {"operation": "op", "problem": "problem", "kernel": "kernel"}
        columns |= {"verdict": "verdict", "then µs": "then_us", "now µs": "now_us"}
        columns |= {"ratio": "ratio", "error": "error", "reason": "reason"}
        title = f"{file} again on {here.target.name} {here.target.device}"
        console.table_of(title, rows, columns, right=("then µs", "now µs", "ratio", "error"))
        for line in differs:
            console.out().print(f"differs: {line}")
    if any(row["verdict"] == "WRONG" for row in rows):
        context.exit(1)


@click.command()
@click.argument("file", type=_FILE, metavar="FILE")
@click.argument("row", type=click.IntRange(0), metavar="ROW")
@options.as_json
def repro(file: Path, row: int, as_json: bool) -> None:
    """Print the command, and a short script, that reproduce row ROW of a result file with its configuration (the first row is 0).
    The script uses the timing mode of the row, the command all modes.

    \b
    kernelbench repro results.json 12
    """
    from gristmill.autotune.candidate import TimingMode

    data = result_file.read(file)
    if row >= len(data["rows"]):
        raise click.UsageError(f"{file} has {len(data['rows'])} rows, counted from 0; there is no row {row}")
    stored = data["rows"][row]
    line = result_file.command(stored, data.get("environment", {}).get("target"))
    mode, config = TimingMode.parse(stored.get("timing") or ""), stored.get("config")
    device = "cpu" if str(data.get("environment", {}).get("target")).startswith("cpu") else "cuda:0"
    script = _SCRIPT.format(
        op=stored["op"],
        kernel=stored["kernel"],
        problem=stored["problem"],
        hot=mode.hot,
        eager=mode.eager,
        isolated=mode.isolated,
        config=f'kernel.config(problem, device_target("{device}", Policy()))'
        if config is None
        else repr(config),
        device=device,
    )
    if as_json:
        console.emit({"command": line, "script": script})
    else:
        console.out().print(line, soft_wrap=True)
        console.out().print(f"\n{script}", soft_wrap=True)


_SCRIPT = """from gristmill.autotune.device import device_target
from gristmill.autotune.rotation import Rotation
from gristmill.autotune.candidate import Candidate
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry

op = default_registry().op("{op}")
kernel = default_registry().kernel("{op}", "{kernel}")
problem = op.problem("{problem}")
config = {config}
candidate = Candidate(kernel, config, Rotation(op, kernel, problem, "{device}", hot={hot}), eager={eager}, isolated={isolated})
print(sorted(candidate.sample() for _ in range(15))[7], "us")
candidate.conclude()
"""


@click.command()
@click.argument("files", nargs=-1, required=True, type=_FILE, metavar="FILE...")
@options.min_effect(0.05, "The smallest relative change that counts.")
@options.as_json
def history(files: tuple[Path, ...], min_effect: float, as_json: bool) -> None:
    """Rows that several result files have in common, by date, and their changes.

    A change exceeds the minimum effect and the spread of the samples on both sides.
    """
    from gristmill.bench.history import history as series

    histories = series([(str(path), result_file.read(path)) for path in files], min_effect)
    if as_json:
        console.emit(
            [
                {
                    "op": s.key[0],
                    "problem": s.key[1],
                    "kernel": s.key[2],
                    "device": s.key[3],
                    "points": [vars(p) for p in s.points],
                }
                for s in histories
            ]
        )
        return
    rows = []
    for one in histories:
        changes = [f"{p.change - 1:+.0%} in {p.file}" for p in one.points if p.change is not None]
        rows.append(
            [
                one.key[0],
                one.key[1],
                one.key[2],
                len(one.points),
                console.number(one.points[0].us),
                console.number(one.points[-1].us),
                "; ".join(changes) or "no change",
            ]
        )
    console.table(
        f"{len(files)} result files",
        ["operation", "problem", "kernel", "points", "first µs", "last µs", "changes"],
        rows,
        right=("points", "first µs", "last µs"),
    )
