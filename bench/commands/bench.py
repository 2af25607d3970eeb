"""kernelbench bench: time verified kernels of operations, next to the measured floor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from gristmill import console
from gristmill.autotune.place import Place, imported, place
from gristmill.bench import options
from gristmill.bench.model_options import ModelOptions, model_options
from gristmill.bench.out_file import store_to_write
from gristmill.bench.peers import unwrapped
from gristmill.bench.problems import (
    Asked,
    Workload,
    baseline_of,
    chosen,
    configured,
    here_or_refuse,
    named,
    problem_options,
)
from gristmill.bench.result_file import write
from gristmill.kernel_registry.registry import default_registry


@click.command()
@problem_options
@model_options
@click.option(
    "--kernels",
    metavar="A,B",
    help="Only these kernels; patterns such as *_cpu are allowed. Default: all that can run here.",
)
@click.option(
    "--baseline",
    metavar="K",
    help="The kernel that speedups refer to; a pattern such as *_torch selects one per problem.",
)
@click.option(
    "--config",
    metavar="A=1,B=2",
    help="With one kernel in --kernels: its configuration, instead of the default one.",
)
@click.option(
    "--ranks",
    type=click.IntRange(2),
    metavar="N",
    help="Of collective operations: N processes, on a GPU each, or on the CPU. The time is that of the slowest.",
)
@options.target
@click.option(
    "--seconds", type=options.Finite(0.01), default=0.5, show_default=True, help="Time spent on each row."
)
@click.option(
    "--quick",
    is_flag=True,
    help="Only cold calls, as deployed; no hot, eager or isolated ones.",
)
@click.option(
    "--save",
    is_flag=True,
    help="Write the times to the store, each under its own key; selection uses those of cold calls back to back.",
)
@options.results("Write a result file: rows with samples, device, driver, clocks, versions, command.")
@options.as_json
def bench(
    asked: Asked,
    of_model: ModelOptions,
    kernels: str | None,
    baseline: str | None,
    config: str | None,
    ranks: int | None,
    target: str | None,
    seconds: float,
    quick: bool,
    save: bool,
    results: Path | None,
    as_json: bool,
) -> None:
    """Time kernels of OP, of a suite, or of the calls of a model. Results are checked before, during and after timing.

    \b
    kernelbench bench rms_norm --problem "m=1|64,n=4096" --baseline rms_norm_torch
    kernelbench bench all_reduce --ranks 2 --problem "m=1|8|32|128|512,n=4096"
    kernelbench bench --model llama-3-8b --tp 2 --weights int4_g128 --mix decode --baseline "*_torch"

    \b
    us, spread          median microseconds per call, and the interquartile range over it: cold, as one graph on a GPU
    times               all timing modes: graph or eager (GPU), cold (arguments in memory) or hot (in the cache), back to
                        back or isolated (each call's input depends on the last call's output)
    gbs, tflops         least bytes, and operations, of the problem, over that time
    fraction_of_floor   measured floor over measured time: 1 = no kernel can be faster
    floor_us            the floor: the time of a kernel that reads as many bytes, timed in the same mode and process, or the
                        least time for arithmetic or a launch (kernelbench doctor --measure), whichever is longest
    floor_source        which of these it is
    bound               what the floor consists of: memory, compute or launch
    error               the operation's error metric against the reference, the worst of all audits
    speedup             the baseline's time over this one, in the rounds that timed both
    reason              why there is no time: what a peer lacks here, what the kernel does not support, what was wrong
    wrong               true if the kernel gave a wrong result, or cheated
    discarded           rounds that were dropped: the clock was off the median round's (GPU)
    note                a remark on the time: faster than the floor means that the floor is too high

    Exit status 0; 1 if a kernel was WRONG.
    """
    from gristmill.autotune.floor import ceilings
    from gristmill.bench.timings import gap_row, kernel_rows

    here = place(target)
    here_or_refuse(here)
    if save:
        store_to_write(here.policy.store_path)
    work = _of_ranks(asked, ranks).workloads(of_model.calls())
    ops = [*dict.fromkeys(one.op for one in work)]
    held = chosen(ops, kernels, here)
    here = imported(
        here, [k for op in ops for k in (*held[op.name], *(named(op, baseline) if baseline else ()))]
    )
    if config is not None and len(fixed := [k for op in ops for k in held[op.name]]) != 1:
        raise click.UsageError(
            f"--config is of one kernel, and --kernels names {len(fixed) if kernels else 'none'}"
        )
    limits = ceilings(
        here.device or "cpu"
    )  # measured first: damaged files are refused early, and nothing disturbs new measurements
    rows: list[dict[str, Any]] = []
    for one in console.progress(work, lambda item: f"{item.op.name} {item.problem}", quiet=as_json):
        base = baseline_of(one.op, one.problem, baseline, here) if baseline else None
        configs = (
            {k.name: configured(k, one.problem, here, config) for k in held[one.op.name]}
            if config is not None
            else None
        )
        if one.op.world(one.problem) > 1:
            from gristmill.bench.rank_rows import rank_rows  # imports torch

            made = rank_rows(one.op, one.problem, held[one.op.name], here, baseline=base, configs=configs)
        else:
            made = kernel_rows(
                one.op,
                one.problem,
                held[one.op.name],
                here,
                baseline=base,
                seconds=seconds,
                all_timings=not quick,
                configs=configs,
            )
        made += [
            gap_row(one.op, one.problem, name, why)
            for name, why in unwrapped(one.op, here).items()
            if kernels is None
        ]
        rows += [row | ({} if one.weight is None else {"weight": one.weight}) for row in made]
    if save:
        _save(rows, here)
    if results:
        write(results, here, rows, ceilings=limits.as_dict())
    for row in rows:
        for entry in (row, *row["times"].values()):
            entry.pop("samples")
    if as_json:
        console.emit(rows)
    else:
        _print(work, rows, here, baseline)
    if any(row["wrong"] for row in rows):
        click.get_current_context().exit(1)


def _of_ranks(asked: Asked, ranks: int | None) -> Asked:
    """The problems of a collective operation with the number of ranks; UsageError for another operation."""
    if ranks is None:
        return asked
    op = default_registry().op(asked.op_name) if asked.op_name is not None else None
    if op is None or op.ranks is None:
        raise click.UsageError("--ranks is of collective operations: name one, such as all_reduce")
    own = asked.problem_texts or tuple(
        dict.fromkeys(str(op.problem(text).with_values(**{op.ranks: None})) for text in op.bench)
    )
    if any(f"{op.ranks}=" in text for text in own):
        raise click.UsageError(f"give the number of ranks once, by --ranks or by {op.ranks} in --problem")
    return replace(asked, problem_texts=tuple(f"{text},{op.ranks}={ranks}" for text in own))


def _print(work: list[Workload], rows: list[dict[str, Any]], here: Place, baseline: str | None) -> None:
    timed = [name for name in _HEADS if any(name in row["times"] for row in rows)]
    heads = [_HEADS[name] if here.device != "cpu" else _HEADS[name].removesuffix(" eager") for name in timed]
    ops = dict.fromkeys(one.op.name for one in work)
    columns: dict[str, console.Cell] = {"operation": "op"} if len(ops) > 1 else {}
    columns |= {"problem": "problem", "kernel": "kernel"}
    columns |= {head: _us(name) for head, name in zip(heads, timed, strict=True)}
    columns |= {"spread": lambda r: _percent(r["spread"]), "GB/s": "gbs", "TFLOP/s": "tflops"}
    columns |= {"of floor": lambda r: _percent(r["fraction_of_floor"]), "bound": "bound", "error": "error"}
    columns |= {"speedup": "speedup"} if baseline else {}
    columns |= {"": lambda r: r["reason"] or r["note"]}
    console.table_of(
        f"{', '.join(ops)} on {here.target.name} {here.target.device}",
        rows,
        columns,
        right=(*heads, "spread", "GB/s", "TFLOP/s", "of floor", "error", "speedup"),
    )


def _us(timing: str) -> console.Cell:
    """The time of a row in a timing mode."""
    return lambda row: row["times"].get(timing, {}).get("us")


_HEADS = {
    "graph,cold": "µs cold",
    "graph,hot": "µs hot",
    "eager,cold": "µs cold eager",
    "eager,hot": "µs hot eager",
    "graph,cold,isolated": "µs isolated",
    "eager,cold,isolated": "µs isolated eager",
}


def _save(rows: list[dict[str, Any]], here: Place) -> None:
    from gristmill.autotune.store import save
    from gristmill.kernel_registry.store import Timing, Verification, config_key, target_key

    registry = default_registry()
    records: list[Timing | Verification] = []
    for row in rows:
        if row["us"] is None:
            continue
        op = registry.op(row["op"])
        kernel = registry.kernel(op.name, row["kernel"])
        where = {"target": target_key(here.target), "toolchain": here.build.key()}
        records.append(
            Verification(
                op=op.name,
                kernel=row["kernel"],
                code=kernel.verification_hash(row["config"]),
                config=config_key(row["config"]),
                problem=str(op.verification(op.problem(row["problem"]), kernel, row["config"])),
                ok=True,
                error=row["error"],
                **where,
            )
        )
        records += [
            Timing(
                op=op.name,
                kernel=row["kernel"],
                code=kernel.code_hash(row["config"], built=True),
                config=row["config"],
                problem=row["problem"],
                us=one["us"],
                samples=tuple(one["samples"]),
                **where,
                timing=timing,
            )
            for timing, one in row["times"].items()
        ]
    save(here.policy.store_path, records)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.0f} %"
