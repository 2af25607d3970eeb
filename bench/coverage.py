"""Coverage of a model's calls by the store on a device: exact times, near times, times of a sibling device, or none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gristmill.autotune.place import Place
from gristmill.bench.result_file import attributes
from gristmill.bench.shapes import Call
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.select import select
from gristmill.kernel_registry.store import Store

LEVELS = ("exact", "near", "sibling", "default", "none")
"""A measured time of this problem; of a similar one; of another device of the target; the default; no kernel can run it."""

_LEVEL = {
    "measured": "exact",
    "near": "near",
    "sibling": "sibling",
    "model": "default",
    "priority": "default",
}


@dataclass(frozen=True)
class Covered:
    """One call, its coverage, the selected kernel, and its expected time."""

    call: Call
    level: str
    kernel: str | None
    expected_us: float | None

    def as_dict(self) -> dict[str, Any]:
        """The row of JSON."""
        return {
            **attributes(self.call, "op", "problem", "part"),
            "step": str(self.call.step),
            "count": self.call.count,
            **attributes(self, "level", "kernel", "expected_us"),
        }


def coverage(calls: Iterable[Call], here: Place, store: Store) -> list[Covered]:
    """How each call would be served on `here`. Verifies and times nothing, and also works for devices of other machines."""
    registry, covered = default_registry(), []
    seen: dict[tuple[str, str], tuple[str, str | None, float | None]] = {}
    for call in calls:
        key = (call.op, call.problem)
        if key not in seen:
            op = registry.op(call.op)
            chosen = select(
                op,
                op.problem(call.problem),
                registry.kernels_of(op.name),
                here.target,
                here.build,
                store,
                here.policy,
                foreign=here.device is None,
            ).best
            seen[key] = (
                ("none", None, None)
                if chosen is None
                else (_LEVEL[chosen.source or "priority"], chosen.kernel.name, chosen.expected_us)
            )
        covered.append(Covered(call, *seen[key]))
    return covered


def shares(covered: Iterable[Covered]) -> dict[str, float]:
    """The share of calls at each level, weighted by how often they are made."""
    totals = dict.fromkeys(LEVELS, 0.0)
    for one in covered:
        totals[one.level] += one.call.weight
    whole = sum(totals.values())
    return {level: total / whole if whole else 0.0 for level, total in totals.items()}
