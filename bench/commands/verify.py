"""kernelbench verify: run kernels against the reference."""

from __future__ import annotations

from typing import Any

import click

from gristmill import console
from gristmill.autotune.place import Place
from gristmill.bench import options
from gristmill.bench.examples import examples
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem


@click.command()
@click.option("--op", "op_name", metavar="OP", help="Only this operation.")
@click.option("--kernel", "kernel_name", metavar="K", help="Only this kernel.")
@options.target
@click.option(
    "--properties",
    "tried",
    is_flag=True,
    help="Also test declared properties: determinism and batch invariance.",
)
@options.as_json
@click.pass_context
def verify(
    context: click.Context,
    op_name: str | None,
    kernel_name: str | None,
    target: str | None,
    tried: bool,
    as_json: bool,
) -> None:
    """Run every available kernel on every example of its operation, and compare with the torch reference.

    Outputs are filled with poison between guard bands; inputs must stay unchanged. Each kernel runs in a child
    process, so a crash is reported as a result. With --properties each kernel that matched runs repeatedly, and on parts
    of a batch; cases that cannot be tested (ragged batches) are null. Exit status 1 if any kernel is wrong.
    """
    from gristmill.autotune.worker import Worker

    here, work, _ = examples(target, op_name, kernel_name)
    device = here.device or "cpu"
    rows, worker = [], Worker()
    for example in console.progress(work, str, quiet=as_json):
        op, kernel, problem = example.op, example.kernel, example.problem
        outcome = example.verify(worker, device)
        row = {
            "op": op.name,
            "kernel": kernel.name,
            "problem": str(problem),
            "ok": outcome["ok"],
            "error": outcome["error"],
            "tolerance": op.tolerance(problem).limit,
            "reason": outcome["reason"],
        }
        if tried:
            row |= (
                _properties(op, kernel, problem, here)
                if row["ok"] and op.world(problem) == 1
                else {"deterministic": None, "batch_invariant": None}
            )
        rows.append(row)
    worker.close()
    if as_json:
        console.emit(rows)
    else:
        columns: dict[str, console.Cell] = {"operation": "op", "kernel": "kernel", "problem": "problem"}
        columns |= {"": lambda r: "ok" if r["ok"] else "WRONG", "error": "error", "tolerance": "tolerance"}
        if tried:
            columns["deterministic"] = lambda r: _seen(r["deterministic"])
            columns["batch invariant"] = lambda r: _seen(r["batch_invariant"])
        columns["reason"] = "reason"
        title = f"Verification on {here.target.name}"
        console.table_of(title, rows, columns, right=("error", "tolerance"))
    if not all(row["ok"] for row in rows):
        context.exit(1)


def _properties(op: Op, kernel: Kernel, problem: Problem, here: Place) -> dict[str, Any]:
    from gristmill.autotune.properties import properties

    seen = properties(op, kernel, lambda p: kernel.config(p, here.target), problem, here.device or "cpu")
    fields: dict[str, Any] = {"deterministic": seen.deterministic, "batch_invariant": seen.batch_invariant}
    return fields | ({"ok": False, "reason": "; ".join(seen.broken)} if seen.broken else {})


def _seen(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"
