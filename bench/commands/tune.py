"""kernelbench tune: find the fastest verified kernel and configuration of each problem, and write it to the store."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from gristmill import console
from gristmill.autotune.options import Job
from gristmill.autotune.place import place
from gristmill.bench import options
from gristmill.bench.model_options import ModelOptions, model_options
from gristmill.bench.out_file import store_to_write
from gristmill.bench.problems import call_weights, concrete, here_or_refuse
from gristmill.bench.shapes import Call
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store


@click.command()
@click.argument("op_name", metavar="[OP]", required=False)
@model_options
@click.option(
    "--problem",
    "problem_texts",
    metavar="P",
    multiple=True,
    help="A problem of OP; may be given several times.",
)
@click.option(
    "--shapes",
    "captured",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Tune the problems that kernelbench shapes capture recorded; those that move most data come first.",
)
@options.minutes("The time budget, kept within 10 %.")
@click.option("--redo", is_flag=True, help="Also tune problems that are in the store.")
@options.workers(options.spare_processors())
@options.target
@options.results("Write a result file.")
@options.as_json
def tune(
    op_name: str | None,
    of_model: ModelOptions,
    problem_texts: tuple[str, ...],
    captured: Path | None,
    minutes: float,
    redo: bool,
    workers: int,
    target: str | None,
    results: Path | None,
    as_json: bool,
) -> None:
    """Tune the problems of OP (its benchmark problems by default), or of a model, on this machine.

    \b
    kernelbench tune linear --problem "m=1,n=4096,k=4096,w=int4_g128" --minutes 2
    kernelbench tune --model llama-3-8b --weights int4_g128 --decode 1x1024 --prefill 1x2048

    Candidates are all kernels that can run, except those that cost models rule out. Child processes verify those of up to 24 problems at a
    time, for half of these problems' time at most; then each problem has an even share of the time left: successive halving reduces its
    candidates, and the last three race against the default. Every problem is written to the store when it is done: an interrupted run
    resumes, because problems that are in the store are skipped.
    JSON and result files have per problem the saved time, multiplied by its number of calls (saved_us). For the calls of a
    model, and for captured calls, they also have the saved time per token, and tables are ranked by it.
    """
    from gristmill.autotune.store import update
    from gristmill.autotune.tune import tune as run
    from gristmill.autotune.tune import with_tuned
    from gristmill.bench.capture import read as read_shapes
    from gristmill.bench.result_file import write

    if sum(given is not None for given in (op_name, of_model.model, captured)) != 1:
        raise click.UsageError("give one of: an operation, a model with --model, or a file with --shapes")
    here = place(target)
    here_or_refuse(here)
    calls = of_model.calls()
    if op_name is None:
        if problem_texts:
            raise click.UsageError("--problem needs an operation")
        jobs = jobs_of(calls if captured is None else read_shapes(captured))
    else:
        op = default_registry().op(op_name)
        jobs = [Job(op, problem) for problem in concrete(op, problem_texts or op.bench)]
    path = here.policy.store_path
    held = store_to_write(path)

    def keep(records: list[Any]) -> Store:
        return update(path, lambda present: with_tuned(present, records))

    try:
        with console.status(quiet=as_json) as progress:
            tuned = run(
                jobs,
                here,
                keep,
                seconds=60 * minutes,
                store=held,
                redo=redo,
                workers=workers,
                progress=progress,
            )
    except KeyboardInterrupt:
        console.err().print(
            f"Results so far are in {path}; run the same command to continue.", soft_wrap=True
        )
        raise
    rows, tokens = [one.as_dict() for one in tuned], sampled(jobs)
    for row in rows:
        row["saved_ms_per_token"] = (
            row["saved_us"] / tokens / 1e3 if tokens and row["saved_us"] is not None else None
        )
    if results:
        write(results, here, [row | {"kernel": row["kernel"] or ""} for row in rows])
    summary = _summary(rows) | {"store": str(path)}
    rows.sort(key=lambda row: -(row["saved_ms_per_token"] or 0.0))
    if as_json:
        console.emit(summary | {"problems": rows})
        return
    columns: dict[str, console.Cell] = {"operation": "op", "problem": "problem", "": "state"}
    columns |= {
        "tried": lambda r: r["options"] - r["untried"] or "",
        "wrong": lambda r: len(r["wrong"]) or "",
    }
    columns |= {"untried": lambda r: r["untried"] or ""} if any(row["untried"] for row in rows) else {}
    columns |= {"kernel": "kernel", "µs": "us", "default µs": "default_us"}
    columns |= {"gain": lambda r: "-" if r["gain"] is None else f"{r['gain']:.2f}x"}
    columns |= {"saved ms/token": "saved_ms_per_token"} if tokens else {}
    columns |= {"reason": "reason"} if any(row["reason"] for row in rows) else {}
    right = ("tried", "wrong", "untried", "µs", "default µs", "gain", "saved ms/token")
    console.table_of(f"Tuned for {here.target.name} {here.target.device}", rows, columns, right)
    states = ", ".join(f"{count} {state}" for state, count in summary["states"].items())
    gain = "" if summary["gain"] is None else f"; {summary['gain']:.3f}x the default, geometric mean"
    saved = (
        ""
        if summary["saved_ms_per_token"] is None
        else f"; {console.number(summary['saved_ms_per_token'])} ms per token saved"
    )
    more = {"out of time": "run the same command to continue", "known": "--redo tunes them again"}
    hints = "".join(f" ({state}: {hint})" for state, hint in more.items() if state in summary["states"])
    console.out().print(f"\n{states}{gain}{saved}. Written to {path}{hints}")


def jobs_of(calls: Iterable[Call]) -> list[Job]:
    """One job per problem, weighted by its number of calls in the model; those that move most data first."""
    ops, weights = default_registry().op, call_weights(calls)
    jobs = [Job(ops(op), ops(op).problem(problem), weight) for (op, problem), weight in weights.items()]
    return sorted(jobs, key=lambda job: -job.weight * _size(job))


def _size(job: Job) -> float:
    cost = job.op.cost(job.problem)
    return cost.bytes + cost.flops / 150  # a device does some hundred operations per byte


def sampled(jobs: Iterable[Job]) -> float:
    """Tokens that the calls of `jobs` generate, weighted: the draws of the operation `sample`, 0 if it is not among them."""
    return sum(job.weight * job.problem.integer("m") for job in jobs if job.op.name == "sample")


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    states: dict[str, int] = {}
    for row in rows:
        states[row["state"]] = states.get(row["state"], 0) + 1
    gains = [math.log(row["gain"]) for row in rows if row["gain"]]
    saved = [row["saved_ms_per_token"] for row in rows if row["saved_ms_per_token"] is not None]
    return {
        "states": states,
        "gain": math.exp(sum(gains) / len(gains)) if gains else None,
        "saved_ms_per_token": sum(saved) if saved else None,
    }
