"""kernelbench decode: milliseconds per token of a whole model, and the share of its linear layers."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import click

from gristmill import console
from gristmill.autotune.place import place
from gristmill.bench import options
from gristmill.bench.out_file import OutFile
from gristmill.bench.result_file import write


@click.command()
@click.option(
    "--model",
    "name",
    default="llama-3-8b",
    show_default=True,
    metavar="M",
    help="A shipped model (kernelbench shapes --help), a config.json, a directory with one, or a repository of the hub; only its sizes count.",
)
@click.option(
    "--quant",
    default="int4_g128",
    show_default=True,
    metavar="A,B",
    help="Schemes of linear weights; bf16 keeps them.",
)
@click.option("--batch", default="1,16", show_default=True, metavar="N,M", help="Sequences per step.")
@click.option(
    "--context",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    metavar="N",
    help="Tokens of each prompt.",
)
@click.option(
    "--steps", type=click.IntRange(1), default=64, show_default=True, metavar="N", help="Steps to measure."
)
@click.option(
    "--ranks", type=click.IntRange(2), metavar="N", help="Share the model among N processes, on a GPU each."
)
@click.option("--trace", is_flag=True, help="Also the kernels of a step, traced by CUPTI. GPUs only.")
@options.target
@click.option(
    "--out",
    type=OutFile(),
    metavar="FILE",
    help="Write a result file: rows with samples, device, driver, clocks, versions, command.",
)
@click.option("--json", "as_json", is_flag=True, help="Only JSON on stdout.")
def decode(
    name: str,
    quant: str,
    batch: str,
    context: int,
    steps: int,
    ranks: int | None,
    trace: bool,
    target: str | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Time decode steps of a model with random weights, through the runtime that serves requests.

    On a GPU steps are CUDA graphs.

    \b
    step          a step of the engine, until its ids are on the host      device   its graph alone, replayed back to back
    linear, head  the linear layers, the logits head, as graphs alone      share    of linear in device
    norm          the norms between the blocks; of several ranks with the sums that they complete
    floor         bytes of the linear weights (or of everything that is read, with head and cache) over the measured read bandwidth
    trace         with --trace: microseconds of each kernel, and of the device without any, in a replay of the graph; of several ranks, on
                  the first one, where a kernel that waits for another rank is running

    \b
    With --json, a list of {"quant", "batch", "context", "steps", "load_s", "step_ms", "tokens_per_s", "device_ms", "linear_ms", "head_ms", "norm_ms",
    "linear_share", "linear_floor_ms", "floor_ms", "read_gbs", "linear_bytes", "head_bytes", "kv_bytes", "weight_bytes",
    "graphs", "kernels", with --trace "trace"}
    """
    from gristmill.bench.decode import measure_decode, model_config
    from gristmill.bench.rank_decode import measure_together
    from gristmill.bench.shapes import load_config

    here = place(target)
    if here.device is None:
        raise click.UsageError(f"{here.target.name} is not a device of this machine; nothing can run on it")
    if trace and not here.device.startswith("cuda"):
        raise click.UsageError(f"--trace takes the kernels of a GPU; {here.target.name} is a CPU")
    config, sizes = model_config(load_config(name)), _numbers(batch)
    if context + 2 * steps > config.max_position:
        raise click.UsageError(
            f"{name} has {config.max_position} positions, fewer than a context of {context} and {steps} steps take"
        )
    rows: list[dict[str, Any]] = []
    for scheme in quant.split(","):
        measure = config, scheme.strip(), sizes, context, steps, here.device
        if ranks is None:
            measured = measure_decode(*measure, here.policy, trace=trace)
        else:
            measured = measure_together(*measure, ranks, here.policy, trace)
        for row in measured:
            rows.append(row)
            if not as_json:
                _show(name, row)
            if out:
                write(out, here, rows, model=name)
        gc.collect()  # frees the model before the next one is made
    for row in rows:
        row.pop("samples_ms")
        row.pop("step_samples_ms")
    if as_json:
        console.emit(rows)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise click.UsageError(
            f"--batch takes comma-separated numbers of sequences, such as 1,16; got {text!r}"
        )
    return numbers


def _show(name: str, row: dict[str, Any]) -> None:
    columns = {"step ms": _ms("step_ms"), "device": _ms("device_ms"), "linear": _ms("linear_ms")}
    columns |= {"head": _ms("head_ms"), "norm": _ms("norm_ms")}
    columns |= {"share of linear": lambda r: f"{r['linear_share'] * 100:.0f} %"}
    columns |= {"floor of linear": _ms("linear_floor_ms"), "floor of all": _ms("floor_ms")}
    columns |= {"tokens/s": lambda r: f"{r['tokens_per_s']:,.0f}"}
    title = f"{name}, {row['quant']}, batch {row['batch']}, context {row['context']}"
    console.table_of(title, [row], columns)
    if "trace" in row:
        traced = row["trace"]
        parts = [*traced["kernels"].items(), ("(no kernel)", traced["idle"])]
        rows = [{"kernel": name, "us": us} for name, us in sorted(parts, key=lambda part: -part[1])]
        console.table_of(
            f"a step of {traced['step']:.0f} µs, {traced['launches']:.0f} launches",
            rows,
            {"µs": _us, "kernel": "kernel"},
            right=("µs",),
        )


def _us(row: dict[str, Any]) -> str:
    return f"{row['us']:.1f}"


def _ms(key: str) -> console.Cell:
    return lambda row: f"{row[key]:.3f}"
