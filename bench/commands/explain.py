"""kernelbench explain: which kernel a problem gets, why, and why not the others; the plan of a layer."""

from __future__ import annotations

import click

from gristmill import console
from gristmill.autotune.explanation import Table
from gristmill.autotune.explanation import explain as explain_problem
from gristmill.bench import options
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.registry import default_registry


@click.command()
@click.argument("op_name", metavar="OP")
@click.option("--problem", "text", metavar="P", help='Axis values: "m=16,n=4096,k=4096,x=bf16,w=int4_g128".')
@options.described_target
@click.option("--axes", is_flag=True, help="Print the axes of OP's problems, and exit.")
@options.as_json
def explain(op_name: str, text: str | None, target: str | None, axes: bool, as_json: bool) -> None:
    """Print the kernel that OP runs for a problem, and the reasons against every other one.

    Without its dynamic size (m, q_tokens ...) the problem is a layer, and the plan by size is printed too. On a device
    of this machine the winner is verified if it has no record yet. On another target nothing is verified, and candidates that
    could run stay "unverified".

    \b
    Verdicts: selected, eligible, unverified, hardware (the device lacks something), build (this installation lacks
    something), problem (the kernel does not take it), policy, quarantined (it failed verification here).
    Sources of expected times: measured, near (a similar problem), sibling (a similar device), model, priority (none).
    """
    op = default_registry().op(op_name)
    if axes:
        _axes(op, as_json)
        return
    if text is None:
        raise click.UsageError(f'--problem is missing; "kernelbench explain {op_name} --axes" lists its axes')
    explanation = explain_problem(op, text, target)
    if as_json:
        console.emit(explanation.as_dict())
        return
    for index, part in enumerate(explanation.parts()):
        if index:
            console.out().print()
        if isinstance(part, Table):
            console.table(part.title, part.columns, part.rows, right=part.right)
        else:
            console.out().print(part)


def _axes(op: Op, as_json: bool) -> None:
    rows = [
        {"axis": a.name, "wants": a.wants(), "default": a.default, "dynamic": a.dynamic, "meaning": a.help}
        for a in op.axes
    ]
    if as_json:
        console.emit({"op": op.name, "axes": rows, "examples": [*op.examples]})
        return
    console.table(
        f"Axes of {op.name}: {op.summary}",
        ["axis", "takes", "default", "changes per call", "meaning"],
        [[r["axis"], r["wants"], r["default"], "yes" if r["dynamic"] else "", r["meaning"]] for r in rows],
    )
    console.out().print(f'\nFor example: kernelbench explain {op.name} --problem "{op.bench[0]}"')
