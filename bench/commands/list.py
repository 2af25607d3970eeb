"""kernelbench list: every kernel, and why some cannot run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from gristmill import console
from gristmill.autotune.place import place
from gristmill.bench import options
from gristmill.kernel_registry.grades import Proof, best
from gristmill.kernel_registry.registry import default_registry


@click.command("list")
@click.option("--op", "op_name", metavar="OP", help="Only this operation.")
@options.described_target
@options.as_json
def list_kernels(op_name: str | None, target: str | None, as_json: bool) -> None:
    """Every kernel of every operation, and whether this machine (or a target) can run it.

    A kernel is available when the hardware has what it needs and this installation can compile or load its code. Only
    specs are read: no kernel code is imported and no device is used. Its proof is the best grade on the target, with the file behind it,
    before anything is verified here: elsewhere, emulated, newer, interpreted, compiled; "failed" instead if it was wrong on a device of
    this kind; and how much it spills there. A plugin that failed to load is a row without
    operation and kernel, with any --op, because its kernels are not known.
    """
    registry = default_registry()
    here = place(target)
    ops = [registry.op(op_name)] if op_name is not None else list(registry.ops.values())
    rows: list[dict[str, Any]] = []
    for op in sorted(ops, key=lambda op: op.name):
        for kernel in registry.kernels_of(op.name):
            reasons = [*kernel.requires.check_hardware(here.target, here.build)]
            reasons = reasons or [*kernel.requires.check_build(here.target, here.build)]
            proof = None if reasons else best(kernel, here.target)
            rows.append(
                {
                    "op": op.name,
                    "kernel": kernel.name,
                    "provider": kernel.provider,
                    "language": kernel.language,
                    "available": not reasons,
                    "reasons": reasons,
                    "proof": None if proof is None else asdict(proof),
                }
            )
    rows += [
        {
            "op": None,
            "kernel": None,
            "provider": failure.plugin.distribution,
            "language": None,
            "available": False,
            "reasons": [str(failure)],
            "proof": None,
        }
        for failure in registry.failures
    ]
    if as_json:
        console.emit(rows)
        return
    console.table(
        f"Kernels on {here.target.name}" + ("" if here.device else " (not a device of this machine)"),
        ["operation", "kernel", "provider", "language", "", "proof", "why not"],
        [
            [
                r["op"] or "-",
                r["kernel"] or "-",
                r["provider"],
                r["language"] or "-",
                "yes" if r["available"] else "no",
                str(Proof(**r["proof"])) if r["proof"] else "-",
                "; ".join(r["reasons"]),
            ]
            for r in rows
        ],
    )
