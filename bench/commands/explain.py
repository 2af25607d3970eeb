"""kernelbench explain: which kernel a problem gets, why, and why not the others; the plan of a layer."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from gristmill import console
from gristmill.bench.place import Place, place
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.plan import MoreMemory, Plan, bucket_sizes, make_plan, more_memory, readable
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.select import NoKernelError, Selection, select
from gristmill.kernel_registry.store import Store


@click.command()
@click.argument("op_name", metavar="OP")
@click.option("--problem", "text", metavar="P", help='Axis values: "m=16,n=4096,k=4096,x=bf16,w=int4_g128".')
@click.option(
    "--target", metavar="T", help="A device: sm_121, h200, gfx942, cpu:avx2 ... Default: this machine."
)
@click.option("--axes", is_flag=True, help="Print the axes that problems of OP have, and stop.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def explain(op_name: str, text: str | None, target: str | None, axes: bool, as_json: bool) -> None:
    """Which kernel OP gets for a problem, and what speaks against every other one.

    Without its dynamic size (m, q_tokens ...) the problem is a layer, and the plan by size is printed too. On a device
    of this machine the winner is verified if it was not yet; on another target nothing is, and candidates that could
    run stay "unverified".

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
    here = place(target)
    problem = op.problem(text)
    layer = op.bucket is not None and op.bucket in problem.open_axes
    shown = op.at_bucket(problem, 1) if layer else _closed(op, problem)
    asker = _Asker(op, here)
    selection = asker.selection(shown)
    plan = asker.plan(problem) if layer else None
    more = asker.more_memory(problem, plan) if plan is not None else None
    if as_json:
        answer: dict[str, Any] = {
            "op": op.name,
            "problem": str(problem if layer else shown),
            "target": here.target.name,
            "selected": selection.best.kernel.name if selection.best else None,
            "candidates": [candidate.as_dict() for candidate in selection.candidates],
        }
        if plan is not None:
            answer["plan"] = [entry.as_dict() for entry in plan.entries]
            answer["layouts"] = list(plan.layouts)
            answer["more_memory"] = asdict(more) if more is not None else None
        console.emit(answer)
        return
    _tables(op, shown, here, selection, plan, more)


def _closed(op: Op, problem: Problem) -> Problem:
    """Dynamic axes that were left out take the size of the bucket axis, as a plan's buckets do."""
    if not problem.open_axes or op.bucket is None:
        return problem
    given = {name: value for name, value in problem.values if value is not None}
    return op.problem({**dict(op.at_bucket(op.static(problem), problem.integer(op.bucket)).values), **given})


class _Asker:
    """Selections and plans of one operation here; the store and the installation are read once for all of them."""

    def __init__(self, op: Op, here: Place) -> None:
        self.op, self.here, self.registry = op, here, default_registry()
        self.resolver, self.build = None, here.build
        if here.device is not None:
            from gristmill.autotune.resolve import Resolver

            self.resolver = Resolver(here.device, here.policy)
            self.build = self.resolver.build
        else:
            self.store = Store.read_over_shipped(here.policy.store_path)
        self.layouts = readable(
            self.registry.kernels_of(op.name), self.registry.layouts, here.target, self.build
        )

    def selection(self, problem: Problem) -> Selection:
        """What runs `problem`; on a device of this machine it is verified."""
        return self.peek(problem, None) if self.resolver is None else self.resolver.resolve(self.op, problem)

    def peek(self, problem: Problem, layouts: frozenset[str] | None) -> Selection:
        """Selection by the records as they are."""
        if self.resolver is not None:
            return self.resolver.select(self.op, problem, layouts)
        kernels, here = self.registry.kernels_of(self.op.name), self.here
        return select(
            self.op,
            problem,
            kernels,
            here.target,
            self.build,
            self.store,
            here.policy,
            layouts=layouts,
            foreign=True,
        )

    def plan(self, static: Problem) -> Plan | None:
        """The plan of a layer; None where nothing runs it."""
        try:
            if self.resolver is not None:
                return self.resolver.plan(self.op, static)
            return make_plan(self.op, static, self.layouts, self.here.policy, self.peek, sizes=bucket_sizes())
        except NoKernelError:
            return None

    def more_memory(self, static: Problem, plan: Plan) -> MoreMemory | None:
        """What the policy's bound on memory keeps from the plan."""
        return more_memory(self.op, static, self.layouts, self.here.policy, self.peek, plan)


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


def _tables(
    op: Op, problem: Problem, here: Place, selection: Selection, plan: Plan | None, more: MoreMemory | None
) -> None:
    where = here.target.name + ("" if here.device else " (not a device of this machine: nothing is verified)")
    console.table(
        f"{op.name} {problem} on {where}",
        ["kernel", "verdict", "expected µs", "source", "reasons"],
        [
            [c.kernel.name, c.verdict, console.number(c.expected_us), c.source, "; ".join(c.reasons)]
            for c in selection.candidates
        ],
        right=("expected µs",),
    )
    if selection.best is None:
        console.out().print("\nNothing can run this problem here.")
    elif here.device is None:
        console.out().print(f"\nWould run, once verified: {selection.best.kernel.name}")
    if plan is not None:
        console.out().print()
        console.table(
            "Plan" + (f" over {', '.join(plan.layouts)}" if plan.layouts else ""),
            [f"{op.bucket} up to", "kernel", "layout", "expected µs", "source", "configuration"],
            [
                [
                    entry.m_max or "any",
                    entry.kernel,
                    entry.layout,
                    console.number(entry.expected_us),
                    entry.source,
                    ", ".join(f"{k}={v}" for k, v in entry.config.items()),
                ]
                for entry in plan.entries
            ],
            right=(f"{op.bucket} up to", "expected µs"),
        )
    if more is not None:
        gain = (
            f"expected {more.faster:.2f}x faster over the sizes"
            if more.faster
            else "preferred by priority, not timed"
        )
        console.out().print(
            f"\nMore memory: {' + '.join(more.layouts)} takes {more.memory:.2f}x the weight's bytes and is {gain}; "
            f"the policy's weight_memory allows {here.policy.weight_memory}."
        )
