"""One process chooses kernels: rank 0 answers the questions of the other ranks, in a thread, while its own steps run.

Selection depends on measured times and on verifications, which may differ between two readings of the store. A rank that chose for
itself could route tokens to other experts than its peers, or call another collective kernel and hang.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from gristmill.autotune.packing import plan_layouts
from gristmill.autotune.resolve import Resolver
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.plan import Plan
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.select import Candidate
from gristmill.kernel_registry.store import target_key
from gristmill.runtime.layers.plans import Plans


class Asking:
    """The questions of a rank: `Resolver.chooser`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

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

    def _ask(self, *question: Any) -> Any:
        self._connection.send(question)
        answer = self._connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def answer_in_thread(resolver: Resolver, connections: Sequence[Connection]) -> None:
    """Answer the other ranks until they have ended."""
    if connections:
        threading.Thread(target=_answer, args=(resolver, list(connections)), daemon=True).start()


def _answer(resolver: Resolver, connections: list[Connection]) -> None:
    while connections:
        for connection in wait(connections):
            assert isinstance(connection, Connection)
            try:
                question = connection.recv()
                connection.send(_answer_one(resolver, *question))
            except (EOFError, OSError):
                connections.remove(connection)


def _answer_one(resolver: Resolver, kind: str, name: str, *details: Any) -> Any:
    op = resolver.registry.op(name)
    try:
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
