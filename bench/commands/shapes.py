"""kernelbench shapes and coverage: the problems that a model calls, and their coverage by the store."""

from __future__ import annotations

import contextlib
import shlex
import sys
from pathlib import Path

import click

from gristmill import console
from gristmill.autotune.place import place
from gristmill.bench import options
from gristmill.bench.model_options import ModelOptions, model_options
from gristmill.bench.out_file import OutFile
from gristmill.bench.shapes import load_config, model_names
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store


@click.group(invoke_without_command=True)
@model_options
@options.as_json
@click.pass_context
def shapes(
    context: click.Context,
    of_model: ModelOptions,
    as_json: bool,
) -> None:
    """List every problem that a model calls in a step, on one rank. Without --model: list the shipped models.

    \b
    kernelbench shapes --model llama-3-70b --tp 8 --weights int4_g128 --decode 64x4096 --prefill 1x2048
    kernelbench shapes capture --out live.json -- generate --model DIR --prompt "Hello"
    """
    if context.invoked_subcommand is not None:
        return
    calls = of_model.calls()
    if of_model.model is None:
        rows = [
            {
                "model": name,
                "type": load_config(name)["model_type"],
                "layers": load_config(name)["num_hidden_layers"],
            }
            for name in model_names()
        ]
        if as_json:
            console.emit(rows)
        else:
            console.table(
                "Models", ["model", "type", "layers"], [list(row.values()) for row in rows], right=("layers",)
            )
        return
    registry = default_registry()
    rows = []
    for call in calls:
        op = registry.op(call.op)
        cost = op.cost(op.problem(call.problem))
        rows.append(
            {
                "step": str(call.step),
                "part": call.part,
                "op": call.op,
                "problem": call.problem,
                "count": call.count,
                "bytes": cost.bytes,
                "flops": cost.flops,
            }
        )
    if as_json:
        console.emit(rows)
        return
    console.table(
        f"{of_model.model} on {of_model.tp} rank(s)",
        ["step", "part", "operation", "problem", "calls", "MB each", "GFLOP each"],
        [
            [
                r["step"],
                r["part"],
                r["op"],
                r["problem"],
                r["count"],
                console.number(r["bytes"] / 1e6),
                console.number(r["flops"] / 1e9),
            ]
            for r in rows
        ],
        right=("calls", "MB each", "GFLOP each"),
    )


@shapes.command(context_settings={"ignore_unknown_options": True})
@click.option("--out", required=True, type=OutFile(), metavar="FILE", help="Where to write them.")
@click.option(
    "--json", "as_json", is_flag=True, help="JSON on stdout; what the program prints goes to stderr."
)
@click.argument("arguments", nargs=-1, required=True, metavar="ARGUMENTS...")
def capture(out: Path, as_json: bool, arguments: tuple[str, ...]) -> None:
    """Run `gristmill ARGUMENTS...` and record every problem that it calls, with the number of calls: input for tune.

    \b
    kernelbench shapes capture --out live.json -- generate --model DIR --prompt "Hello" --max-tokens 64
    kernelbench tune --shapes live.json --minutes 5

    A run that fails or is interrupted leaves its calls so far. Python programs use `with gristmill.bench.capture.capturing() as counts:`.
    """
    from gristmill.bench.capture import capturing, write
    from gristmill.tools.cli import cli as gristmill

    with capturing() as counts:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                gristmill.main(args=list(arguments), prog_name="gristmill", standalone_mode=False)
        finally:
            if counts:  # also after a run that ended early: the calls until then are valid
                write(out, counts, "gristmill " + shlex.join(arguments))
    if not counts:
        raise click.UsageError(
            f"gristmill {shlex.join(arguments)} called no kernel; there is nothing to write to {out}"
        )
    rows = [{"op": op, "problem": problem, "count": count} for (op, problem), count in counts.most_common()]
    if as_json:
        console.emit(rows)
        return
    console.table(
        f"{sum(counts.values())} calls of {len(rows)} problems, in {out}",
        ["calls", "operation", "problem"],
        [[row["count"], row["op"], row["problem"]] for row in rows],
        right=("calls",),
    )


@click.command()
@model_options
@click.option(
    "--target",
    "--device",
    metavar="T",
    help="A device: h200, sm_90, gfx942, cpu:avx2 ... Default: this machine.",
)
@click.option(
    "--store",
    "store_path",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="The only store to use. Default: the one in use, on top of the shipped times.",
)
@options.as_json
def coverage(
    of_model: ModelOptions,
    target: str | None,
    store_path: Path | None,
    as_json: bool,
) -> None:
    """The share of a model's calls for which the store has an exact time, a near one, or none.

    \b
    exact     a time of this problem              near      one of a problem within a factor of two
    sibling   one of another device of the target default   none: by cost model or declared priority
    none      no kernel can run it
    """
    from gristmill.bench.coverage import coverage as covered_calls
    from gristmill.bench.coverage import shares

    if of_model.model is None:
        raise click.UsageError("--model is missing; kernelbench shapes lists those that are shipped")
    here = place(target)
    path = store_path or here.policy.store_path
    if store_path is not None and not store_path.exists():
        raise FileNotFoundError(f"{store_path} does not exist; expected a store")
    held = Store.read(path) if store_path else Store.read_over_shipped(path)
    calls = covered_calls(of_model.calls(), here, held)
    share = shares(calls)
    if as_json:
        console.emit(
            {
                "model": of_model.model,
                "tp": of_model.tp,
                "target": here.target.name,
                "shares": share,
                "calls": [c.as_dict() for c in calls],
            }
        )
        return
    console.table(
        f"{of_model.model} on {of_model.tp} x {here.target.name}",
        ["step", "part", "operation", "problem", "known", "kernel", "expected µs"],
        [
            [
                str(c.call.step),
                c.call.part,
                c.call.op,
                c.call.problem,
                c.level,
                c.kernel,
                console.number(c.expected_us),
            ]
            for c in calls
        ],
        right=("expected µs",),
    )
    console.out().print(
        "\nCalls: " + ", ".join(f"{level} {value:.0%}" for level, value in share.items() if value)
    )
