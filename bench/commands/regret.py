"""kernelbench regret: what selection loses to exhaustive search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gristmill import console
from gristmill.autotune.place import place
from gristmill.bench import options
from gristmill.bench.problems import Asked, here_or_refuse, problem_options


@click.command()
@problem_options
@options.minutes("The time budget; problems that it does not reach are left out.")
@options.workers()
@options.target
@click.option(
    "--replay",
    "replayed",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Measure nothing: evaluate the present selection with the times in a result file of this command.",
)
@options.results("Write a result file, with samples of the candidates near the best.")
@options.as_json
def regret(
    asked: Asked,
    minutes: float,
    workers: int,
    target: str | None,
    replayed: str | None,
    results: Path | None,
    as_json: bool,
) -> None:
    """Time every kernel at every configuration of OP's problems, or of a suite's, in one run, and report how much
    slower the selected kernel is than the fastest candidate.

    \b
    kernelbench regret --suite linear_regret --minutes 10 --workers 14 --results regret.json
    kernelbench regret --replay regret.json

    \b
    store, tuned problems   selection with the store in use (and shipped times), for problems that have times of their own
    store, other problems   the same, for the other problems
    tuned in this run       selection after tuning with half of this run's rounds, evaluated with the other half
    left out of tuning      the same, without the problem's own records
    """
    from gristmill.autotune.options import Job
    from gristmill.bench.regret import study, unknown
    from gristmill.bench.regret import summary as summarized
    from gristmill.bench.replay import replay
    from gristmill.bench.result_file import read, write
    from gristmill.kernel_registry.store import Store

    if replayed:
        if asked != Asked(None) or target or results:
            raise click.UsageError("--replay takes problems and device from its file, and writes no file")
        here, studies = replay(read(replayed))
        job_count = len(studies)
    else:
        here = place(target)
        here_or_refuse(here)
        jobs = [Job(one.op, one.problem) for one in asked.workloads()]
        job_count = len(jobs)
        store = Store.read_over_shipped(here.policy.store_path)
        with console.status(quiet=as_json) as progress:
            studies = study(jobs, here, store, seconds=60 * minutes, workers=workers, progress=progress)
    figures = {name: None if one is None else vars(one) for name, one in summarized(studies).items()}
    rows = [one.as_dict() for one in studies]
    if results:
        write(results, here, rows, regret=figures, asked=job_count)
    if as_json:
        console.emit({"asked": job_count, "studied": len(rows), "regret": figures, "problems": rows})
        return
    columns: dict[str, console.Cell] = {"problem": "problem", "tried": "candidates"}
    columns |= {"missing": lambda r: r["missing"] or "", "best": "kernel", "µs": "us"}
    columns |= {"by store": lambda r: _percent(r["picks"].get("store"))}
    columns |= {"tuned": lambda r: _percent(r["picks"].get("tuned"))}
    columns |= {"left out": lambda r: _percent(r["picks"].get("left out"))}
    columns["picked by store"] = lambda r: r["picks"].get("store", {}).get("kernel")
    right = ("tried", "missing", "µs", "by store", "tuned", "left out")
    console.table_of(f"Regret on {here.target.name} {here.target.device}", rows, columns, right)
    console.table(
        "",
        ["of", "problems", "geometric mean", "median", "worst", "which"],
        [
            [name, "0", "-", "-", "-", ""]
            if one is None
            else [
                name,
                one["problems"],
                *(f"{one[k]:.1%}" for k in ("mean", "median", "worst")),
                one["where"],
            ]
            for name, one in figures.items()
        ],
        right=("problems", "geometric mean", "median", "worst"),
    )
    for name in ("store", "tuned", "left out"):
        if lost := unknown(studies, name):
            console.out().print(f"{name}: {lost} pick(s) have no time, and are in no figure")


def _percent(pick: Any) -> str:
    return "-" if pick is None else f"{pick['regret']:.1%}"
