"""Grades of proof: what shows that a kernel computes what its operation says on a target, best first.

``here`` is a record of the store, made by the first use (`Resolver`). The other grades come from ``grades.json``, which
``python ci/tables.py`` derives from result files, tests, and the baseline of the compile matrix, and CI compares with them. Without a
record there is no grade.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gristmill.kernel_registry.target import Target

GRADES = {
    "here": "verified on this device",
    "elsewhere": "verified on another device of the same kind",
    "emulated": "its machine code executed by an emulator",
    "newer": "executed on a newer GPU",
    "interpreted": "its source executed on a CPU, by Triton's interpreter or as C++",
    "compiled": "compiled for the target, machine code checked",
}
"""Grade -> its meaning, best first."""
RECORDS = Path(__file__).with_name("grades.json")


@dataclass(frozen=True)
class Proof:
    """A grade, and the file that stands behind it, relative to the repository."""

    grade: str
    record: str

    def __str__(self) -> str:
        return f"{self.grade} ({self.record})"


@cache
def _recorded() -> dict[tuple[str, str], tuple[Proof, ...]]:
    """(kernel, architecture) -> its proofs, best first."""
    table: dict[str, dict[str, dict[str, list[str]]]] = json.loads(RECORDS.read_text(encoding="utf-8"))
    found: dict[tuple[str, str], list[Proof]] = {}
    for grade in GRADES:
        for record, kernels in table.get(grade, {}).items():
            for kernel, archs in kernels.items():
                for arch in archs:
                    found.setdefault((kernel, arch), []).append(Proof(grade, record))
    return {key: tuple(proofs) for key, proofs in found.items()}


def proofs(kernel: str, target: Target) -> tuple[Proof, ...]:
    """What is recorded for a kernel on a target, best first; without the store, which alone knows ``here``."""
    return _recorded().get((kernel, target.arch), ())


def best(kernel: str, target: Target) -> Proof | None:
    """The best of `proofs`, None without a record."""
    return next(iter(proofs(kernel, target)), None)
