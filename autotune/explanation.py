"""Why a problem gets its kernel: every candidate with its verdict, and the plan of a layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from gristmill.autotune.dequantizing import advice, is_dequantizing
from gristmill.autotune.place import Place, place
from gristmill.autotune.resolve import Resolver
from gristmill.kernel_registry.grades import best
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.plan import MoreMemory, Plan, bucket_sizes, make_plan, more_memory, readable
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.select import Candidate, NoKernelError, Selection, select
from gristmill.kernel_registry.store import Store
from gristmill.kernel_registry.target import Target

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Table:
    """A title, columns and rows of text to print; the columns in `right` hold numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[str, ...] = ()

    def __str__(self) -> str:
        widths = [max(map(len, cells)) for cells in zip(self.columns, *self.rows, strict=True)]

        def line(cells: tuple[str, ...]) -> str:
            placed = zip(self.columns, cells, widths, strict=True)
            return "  ".join(
                cell.rjust(width) if name in self.right else cell.ljust(width) for name, cell, width in placed
            ).rstrip()

        return "\n".join([self.title, line(self.columns), *map(line, self.rows)])


@dataclass(frozen=True)
class Explanation:
    """The answer of `explain`. ``print(explanation)`` shows it as tables.

    Attributes:
        op, problem: the arguments; open dynamic axes have the size of the bucket axis.
        target: the target of the selection.
        device: the torch device of the target on this machine; None if it is not here, and nothing is verified.
        policy: the policy of the selection.
        selection: the result for one problem; for a layer, the problem of one row.
        bucket: the axis that plans have buckets for, None for an operation without one.
        plan: for a layer, kernel and configuration by size; else None.
        slow: why the selected kernel is slow with few rows: it dequantizes the whole weight in each call; "" for others.
        more_memory: what the plan would gain from more memory than the policy allows; None if nothing.
    """

    op: str
    problem: Problem
    target: Target
    device: str | None
    policy: Policy
    selection: Selection
    bucket: str | None
    plan: Plan | None = None
    more_memory: MoreMemory | None = None
    slow: str = ""

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every kernel of the operation, best first."""
        return tuple(map(self._with_proof, self.selection.candidates))

    def _with_proof(self, candidate: Candidate) -> Candidate:
        """What other devices show of a candidate that is not verified here."""
        if candidate.verdict != "unverified" or self.device is None:
            return candidate
        proof = best(candidate.kernel, self.target)
        return candidate if proof is None else replace(candidate, reasons=(*candidate.reasons, str(proof)))

    @property
    def selected(self) -> str | None:
        """Name of the kernel that runs the problem (on a target that is not here: would run it, once verified); None = none can."""
        return self.selection.best.kernel.name if self.selection.best is not None else None

    def as_dict(self) -> dict[str, Any]:
        """What ``kernelbench explain --json`` prints."""
        data: dict[str, Any] = {
            "op": self.op,
            "problem": str(self.problem),
            "target": self.target.name,
            "selected": self.selected,
            "slow": self.slow or None,
            "candidates": [candidate.as_dict() for candidate in self.candidates],
        }
        if self.plan is not None:
            data["plan"] = [entry.as_dict() for entry in self.plan.entries]
            data["layouts"] = list(self.plan.layouts)
            data["more_memory"] = None if self.more_memory is None else asdict(self.more_memory)
        return data

    def parts(self) -> Iterator[Table | str]:
        """Tables and sentences, in printing order."""
        where = self.target.name
        if self.device is None:
            where += " (not a device of this machine: nothing is verified)"
        rows = [
            (c.kernel.name, c.verdict, _number(c.expected_us), c.source or "", "; ".join(c.reasons))
            for c in self.candidates
        ]
        columns = ("kernel", "verdict", "expected µs", "source", "reasons")
        yield Table(f"{self.op} {self.selection.problem} on {where}", columns, tuple(rows), ("expected µs",))
        if self.selected is None:
            yield "Nothing can run this problem here."
        elif self.device is None:
            yield f"Would run, once verified: {self.selected}"
        if self.slow:
            yield f"Slow with few rows: {self.slow}"
        if self.plan is not None:
            yield self._plan_table(self.plan)
        if self.more_memory is not None:
            yield self._memory_sentence(self.more_memory)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.parts()))

    def _plan_table(self, plan: Plan) -> Table:
        size = f"{self.bucket} up to"
        rows = [
            (
                str(entry.m_max or "any"),
                entry.kernel,
                entry.layout or "",
                _number(entry.expected_us),
                entry.source,
                ", ".join(f"{name}={value}" for name, value in entry.config.items()),
            )
            for entry in plan.entries
        ]
        columns = (size, "kernel", "layout", "expected µs", "source", "configuration")
        title = "Plan" + (f" over {', '.join(plan.layouts)}" if plan.layouts else "")
        return Table(title, columns, tuple(rows), (size, "expected µs"))

    def _memory_sentence(self, more: MoreMemory) -> str:
        gain = (
            f"expected {more.faster:.2f}x faster over the sizes"
            if more.faster
            else "preferred by priority, not timed"
        )
        return (
            f"More memory: {' + '.join(more.layouts)} takes {more.memory:.2f}x the weight's bytes and is {gain}; "
            f"the policy's weight_memory allows {self.policy.weight_memory}."
        )


def explain(
    op: str | Op,
    problem: str | Problem | Mapping[str, object],
    target: str | Target | torch.device | None = None,
    *,
    policy: Policy | None = None,
) -> Explanation:
    """Explain which kernel an operation runs for a problem, and why not the others.

    Args:
        op: an operation or its name.
        problem: text such as ``m=16,n=4096,k=4096,w=int4_g128``, a dict of axis values, or a Problem. Without its bucket axis
            (m, q_tokens ...) it describes a layer, and the plan by size is included.
        target: the name of a target (``sm_120``, ``h200``, ``cpu:avx2``), a Target, or a torch device of this machine
            (``cpu``, ``cuda:1``); None = the first GPU of this machine, else its CPU.
        policy: None = the one that GRISTMILL_POLICY names.

    On a device of this machine the winner is verified if it has no record yet, which runs it. On any other target nothing is verified, and
    candidates that could run stay ``unverified``. Nothing is timed: expected times are microseconds from the store or a cost
    model.

    Raises:
        UnknownError: no operation of that name.
        AxisError: a problem that the operation does not have.
        ValueError: an unknown target.
        TypeError: an argument of the wrong type.
    """
    definition = default_registry().op(op) if isinstance(op, str) else op
    if not isinstance(definition, Op):
        raise TypeError(f"op is the name of an operation or an Op, got {type(op).__name__}")
    if not isinstance(problem, str | Problem | Mapping):
        raise TypeError(f"problem is text, a Problem or a dict of axis values, got {type(problem).__name__}")
    parsed = definition.problem(problem)
    location = place(target, policy)
    layer = definition.bucket is not None and definition.bucket in parsed.open_axes
    closed = definition.at_bucket(parsed, 1) if layer else _closed(definition, parsed)
    selector = _Selector(definition, location)
    plan = selector.plan(parsed) if layer else None
    selection = selector.selection(closed)
    return Explanation(
        op=definition.name,
        problem=parsed if layer else closed,
        target=location.target,
        device=location.device,
        policy=location.policy,
        selection=selection,
        bucket=definition.bucket,
        plan=plan,
        more_memory=selector.more_memory(parsed, plan) if plan is not None else None,
        slow=_slow(selection, selector, definition.static(parsed)),
    )


def _slow(selection: Selection, selector: _Selector, static: Problem) -> str:
    kernel = None if selection.best is None else selection.best.kernel
    if kernel is None or not is_dequantizing(kernel, static):
        return ""
    return f"{kernel.name} dequantizes the whole weight in each call{advice(selector.peek, static)}"


def _number(value: float | None) -> str:
    """Microseconds with three significant digits, "-" when unknown."""
    if value is None:
        return "-"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _closed(op: Op, problem: Problem) -> Problem:
    """`problem` with the size of the bucket axis for open dynamic axes, as in the buckets of a plan."""
    if not problem.open_axes or op.bucket is None:
        return problem
    stated = {name: value for name, value in problem.values if value is not None}
    return op.problem({**dict(op.at_bucket(op.static(problem), problem.integer(op.bucket)).values), **stated})


class _Selector:
    """Selections and plans of one operation at one `Place`; store and installation are read once."""

    def __init__(self, op: Op, location: Place) -> None:
        self.op, self.location, self.registry = op, location, default_registry()
        self.resolver: Resolver | None = None
        self.build = location.build
        if location.device is not None:
            self.resolver = Resolver(location.device, location.policy, target=location.target)
            self.build = self.resolver.build
        else:
            self.store = Store.read_over_shipped(location.policy.store_path)
        self.layouts = readable(
            self.registry.kernels_of(op.name), self.registry.layouts, location.target, self.build
        )

    def selection(self, problem: Problem) -> Selection:
        """The selection for `problem`; on a device of this machine the winner is verified."""
        return self.peek(problem, None) if self.resolver is None else self.resolver.resolve(self.op, problem)

    def peek(self, problem: Problem, layouts: frozenset[str] | None) -> Selection:
        """Selection by the present records, without verification."""
        if self.resolver is not None:
            return self.resolver.select(self.op, problem, layouts)
        kernels, location = self.registry.kernels_of(self.op.name), self.location
        return select(
            self.op,
            problem,
            kernels,
            location.target,
            self.build,
            self.store,
            location.policy,
            layouts=layouts,
            foreign=True,
        )

    def plan(self, static: Problem) -> Plan | None:
        """The plan of a layer; None if no kernel runs it."""
        try:
            if self.resolver is not None:
                return self.resolver.plan(self.op, static)
            return make_plan(
                self.op, static, self.layouts, self.location.policy, self.peek, sizes=bucket_sizes()
            )
        except NoKernelError:
            return None

    def more_memory(self, static: Problem, plan: Plan) -> MoreMemory | None:
        """What the plan would gain without the policy's bound on memory."""
        return more_memory(self.op, static, self.layouts, self.location.policy, self.peek, plan)
