"""kernelbench bench: time the kernels of an operation, next to the measured floor, after checking that they are right."""

from __future__ import annotations

from typing import Any

import click

from gristmill import console
from gristmill.bench.place import Place, place
from gristmill.bench.result_file import write
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry


@click.command()
@click.argument("op_name", metavar="OP")
@click.option("--kernels", metavar="A,B", help="Only these kernels. Default: all that can run here.")
@click.option("--problem", "problem_texts", metavar="P", multiple=True, help="A problem; may be given several times.")
@click.option("--problems", "suite", type=click.Choice(["default", "examples"]), default="default", show_default=True,
              help="A set of problems, used when no --problem is given.")  # fmt: skip
@click.option("--target", metavar="T", help="A device of this machine, or a CPU level such as cpu:avx2.")
@click.option("--seconds", type=click.FloatRange(0.01), default=0.5, show_default=True, help="Time spent on each row.")
@click.option("--save", is_flag=True, help="Write the times to the store, where selection reads them.")
@click.option("--results", type=click.Path(dir_okay=False), metavar="FILE",
              help="Write a result file: rows with raw samples, device, driver, clocks, versions, command.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def bench(
    op_name: str, kernels: str | None, problem_texts: tuple[str, ...], suite: str, target: str | None, seconds: float,
    save: bool, results: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Time kernels of OP. Inputs rotate so that every call finds them cold; a kernel that is wrong is not timed.

    \b
    us                  median microseconds a call       spread   interquartile range over the median
    gbs, tflops         fewest bytes, and operations, of the problem, over that time
    fraction_of_floor   measured floor over measured time: 1 = nothing can be faster
    bound               what the floor consists of: memory, compute or launch (kernelbench doctor --measure)
    error               the operation's error figure against the reference
    """
    op, here = default_registry().op(op_name), place(target)
    if here.device is None:
        raise click.UsageError(f"{here.target.name} is not a device of this machine; nothing can run on it")
    problems = [op.problem(text) for text in problem_texts or (op.bench if suite == "default" else op.examples)]
    for problem in problems:
        if problem.open_axes:
            raise click.UsageError(f"problem {problem} leaves {', '.join(problem.open_axes)} open; give every axis a value")
    chosen = _chosen(op, kernels, here)
    work = [(problem, kernel) for problem in problems for kernel in chosen]
    rows = []
    for problem, kernel in console.progress(work, lambda item: f"{item[1].name} {item[0]}", quiet=as_json):
        rows.append(_row(op, problem, kernel, here, seconds))
    if save:
        _save(op, rows, here)
    if results:
        write(results, here, rows, ceilings=_ceilings(here))
    for row in rows:
        row.pop("samples")
    if as_json:
        console.emit(rows)
        return
    console.table(
        f"{op.name} on {here.target.name} {here.target.device}",
        ["problem", "kernel", "µs", "spread", "GB/s", "TFLOP/s", "of floor", "bound", "error", ""],
        [[r["problem"], r["kernel"], console.number(r["us"]), _percent(r["spread"]), console.number(r["gbs"]),
          console.number(r["tflops"]), _percent(r["fraction_of_floor"]), r["bound"], console.number(r["error"]), r["reason"]]
         for r in rows],
        right=("µs", "spread", "GB/s", "TFLOP/s", "of floor", "error"),
    )  # fmt: skip


def _chosen(op: Op, names: str | None, here: Place) -> list[Kernel]:
    registry = default_registry()
    if names:
        return [registry.kernel(op.name, name.strip()) for name in names.split(",")]
    able = [k for k in registry.kernels_of(op.name) if not k.requires.check_hardware(here.target, here.build)
            and not k.requires.check_build(here.target, here.build)]  # fmt: skip
    return [k for k in able if not (k.language == "triton" and here.device == "cpu")]


def _row(op: Op, problem: Problem, kernel: Kernel, here: Place, seconds: float) -> dict[str, Any]:
    from gristmill.autotune.floor import ceilings
    from gristmill.autotune.timing import measure
    from gristmill.autotune.worker import shared_worker

    row: dict[str, Any] = {
        "op": op.name, "problem": str(problem), "kernel": kernel.name, "us": None, "spread": None, "gbs": None,
        "tflops": None, "fraction_of_floor": None, "bound": None, "error": None, "tolerance": op.tolerance(problem).limit, "reason": "",
        "config": None, "samples": (),
    }  # fmt: skip
    against = [*kernel.requires.check_hardware(here.target, here.build), *kernel.requires.check_build(here.target, here.build)]
    if refusal := "; ".join(against) or kernel.accepts(problem):
        return row | {"reason": refusal}
    device = here.device or "cpu"
    config = dict(kernel.config(problem, here.target))
    outcome = shared_worker().verify(op, kernel, config, op.verification(problem), device)
    row |= {"error": outcome["error"], "config": config}
    if not outcome["ok"]:
        return row | {"reason": f"not timed: {outcome['reason']}"}
    measured, cost = measure(op, kernel, config, problem, device, seconds=seconds), op.cost(problem)
    return row | {
        "us": measured.us, "spread": measured.spread, "samples": measured.samples,
        "gbs": cost.bytes / measured.us / 1e3, "tflops": cost.flops / measured.us / 1e6,
        "bound": ceilings(device).bound(cost),
        "fraction_of_floor": ceilings(device).floor_us(cost) / measured.us if measured.us else None,
    }  # fmt: skip


def _ceilings(here: Place) -> dict[str, Any]:
    from gristmill.autotune.floor import ceilings

    limits = ceilings(here.device or "cpu")
    return {"read_gbs": limits.read_gbs, "copy_gbs": limits.copy_gbs, "tflops": dict(limits.tflops), "launch_us": limits.launch_us}


def _save(op: Op, rows: list[dict[str, Any]], here: Place) -> None:
    from gristmill.autotune.store import save
    from gristmill.autotune.timing import timing_policy
    from gristmill.kernel_registry.store import Timing, Verification, config_key, target_key

    registry, records = default_registry(), []
    for row in rows:
        if row["us"] is None:
            continue
        kernel = registry.kernel(op.name, row["kernel"])
        code = kernel.code_hash()
        where = {"target": target_key(here.target), "toolchain": here.build.key()}
        records.append(Verification(op=op.name, kernel=row["kernel"], code=code, config=config_key(row["config"]),
                                    problem=str(op.verification(op.problem(row["problem"]))), ok=True,
                                    error=row["error"], **where))  # fmt: skip
        records.append(Timing(op=op.name, kernel=row["kernel"], code=code, config=row["config"], problem=row["problem"],
                              us=row["us"], samples=tuple(row["samples"]), **where,
                              timing=timing_policy(kernel, here.device or "cpu")))  # fmt: skip
    save(here.policy.store_path, records)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.0f} %"
