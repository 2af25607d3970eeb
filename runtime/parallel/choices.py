"""One process chooses kernels: rank 0 answers the questions of the other ranks, in a thread for each, while its own steps run.

Selection depends on measured times and on verifications, which may differ between two readings of the store. A rank that chose for
itself could route tokens to other experts than its peers, or call another collective kernel and hang.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from gristmill.autotune.bound import BoundPlan
from gristmill.autotune.packing import plan_layouts
from gristmill.autotune.resolve import Resolver, Task
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.plan import Plan
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.select import Candidate
from gristmill.kernel_registry.store import target_key
from gristmill.runtime.errors import RankError
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.verify_ahead import VerifiedAhead


class Asking:
    """The questions of a rank: `Resolver.chooser`. Threads ask one after another."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._mutex = threading.Lock()

    def choose(self, op: Op, problem: Problem, layouts: frozenset[str] | None) -> Candidate:
        """The kernel that rank 0 runs for a problem, verified by it."""
        name, config, us, source = self._ask("choose", op.name, str(problem), layouts)
        kernel = default_registry().kernel(op.name, name)
        return Candidate(kernel, "selected", (), us, source, config)

    def plan(self, op: Op, static: Problem, sizes: Sequence[int] | None, without: Collection[str]) -> Plan:
        """The plan that rank 0 makes for a static problem."""
        plan: Plan = self._ask("plan", op.name, static, sizes, without)
        return plan

    def layouts(self, problem: Problem, without: frozenset[str]) -> frozenset[str]:
        """The layouts that rank 0 packs the weights of a static problem in."""
        layouts: frozenset[str] = self._ask("layouts", problem.op, problem, without)
        return layouts

    def resolve_all(self, tasks: Sequence[Task], workers: int) -> None:
        """Have rank 0 verify these problems, `workers` at a time, beside its own."""
        problems = [(problem, layouts) for _, problem, layouts in tasks]
        self._ask("resolve_all", "", problems, workers)

    def expect(self, plan: BoundPlan) -> None:
        """Tell rank 0 of a plan that this rank has bound: `VerifiedAhead.expect`."""
        self._ask("expect", plan.op.name, plan.static, plan.layouts)

    def _ask(self, *question: Any) -> Any:
        try:
            with self._mutex:
                self._connection.send(question)
                answer = self._connection.recv()
        except (EOFError, OSError) as error:  # an exception that the driver hears of, after that of rank 0
            raise RankError("rank 0 ended before it chose a kernel") from error
        if isinstance(answer, Exception):
            raise answer
        return answer


def answer_in_threads(
    resolver: Resolver, connections: Sequence[Connection], ahead: VerifiedAhead | None = None
) -> None:
    """Answer the other ranks until they have ended. `ahead` verifies what they expect to call."""
    for connection in connections:
        threading.Thread(target=_answer, args=(resolver, connection, ahead), daemon=True).start()


def _answer(resolver: Resolver, connection: Connection, ahead: VerifiedAhead | None) -> None:
    with suppress(EOFError, OSError):
        while True:
            connection.send(_answer_one(resolver, ahead, *connection.recv()))


def _answer_one(resolver: Resolver, ahead: VerifiedAhead | None, kind: str, name: str, *details: Any) -> Any:
    try:
        if kind == "resolve_all":
            problems, workers = details
            tasks = [(resolver.registry.op(problem.op), problem, layouts) for problem, layouts in problems]
            return resolver.resolve_all(tasks, workers)
        op = resolver.registry.op(name)
        if kind == "expect":
            return None if ahead is None else ahead.expect(op, *details)
        if kind == "plan":
            return resolver.plan(op, *details)
        if kind == "layouts":
            return plan_layouts(resolver, *details)
        text, layouts = details
        best = resolver.resolve(op, op.problem(text), layouts).require()
        return best.kernel.name, dict(best.config or {}), best.expected_us, best.source
    except Exception as error:
        return error


def installation(resolver: Resolver) -> str:
    """What must be the same on all ranks: device type, toolchain, and the kernels with their code."""
    kernels = sorted(f"{k.op} {k.name} {k.code_hash()}" for k in resolver.registry.all_kernels())
    digest = hashlib.sha256("\n".join(kernels).encode()).hexdigest()[:16]
    return f"{target_key(resolver.target)}, toolchain {resolver.build.key()}, kernels {digest}"


def digests(plans: Plans) -> dict[str, str]:
    """Operation and problem of each bound plan -> the digest of its layouts and of the kernels that are chosen so far."""
    return {
        f"{plan.op.name} {plan.static}": Plan(
            plan.op.name,
            plan.static,
            tuple(entry for entry in plan.entries if entry is not None),
            tuple(sorted(plan.layouts or ())),
        ).digest()
        for plan in plans.bound.values()
    }


def difference(first: dict[str, str], other: dict[str, str]) -> str:
    """A plan that two ranks have, with different kernels; "" if there is none. A plan that only one has is of its own sizes."""
    return next((key for key in first.keys() & other.keys() if first[key] != other[key]), "")
