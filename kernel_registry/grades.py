"""Grades of proof: what shows that a kernel computes what its operation says on a target, best first.

``here`` is a record of the store, made by the first use (`Resolver`). The other grades come from ``grades.json``, which
``python ci/generate.py`` derives from result files, proof reports (`kernelbench prove`), tests, and the baseline of the compile matrix, and
CI compares with them. Without a record there is no grade. What comes from a proof report carries the hash of the kernel's code, and
counts while the code has it: for the kernel, or, if it was wrong there, against it and every other grade.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gristmill.kernel_registry.kernel import Kernel
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
FAILED = "failed"
"""In place of a grade: it did not match the reference on another device of the same kind. No policy can name it."""
RECORDS = Path(__file__).with_name("grades.json")


@dataclass(frozen=True)
class Proof:
    """A grade, or `FAILED`; the file that is the evidence, relative to the repository; the hash of the code that it counts for, "" = any."""

    grade: str
    record: str
    code: str = ""

    def __str__(self) -> str:
        return f"{'wrong elsewhere' if self.grade == FAILED else self.grade} ({self.record})"


@cache
def _recorded() -> dict[tuple[str, str], tuple[Proof, ...]]:
    """(kernel, architecture or CPU level) -> its proofs."""
    table: dict[str, dict[str, dict[str, list[str] | dict[str, str]]]] = json.loads(
        RECORDS.read_text(encoding="utf-8")
    )
    found: dict[tuple[str, str], list[Proof]] = {}
    for grade in (FAILED, *GRADES):
        for record, kernels in table.get(grade, {}).items():
            for kernel, archs in kernels.items():
                codes = archs if isinstance(archs, dict) else dict.fromkeys(archs, "")
                for arch, code in codes.items():
                    found.setdefault((kernel, arch), []).append(Proof(grade, record, code))
    return {key: tuple(proofs) for key, proofs in found.items()}


def proofs(kernel: Kernel, target: Target) -> tuple[Proof, ...]:
    """What is recorded for a kernel, with its present code, on a target, best first; only the failure if it failed there.

    Without the store, which alone knows ``here``.
    """
    kinds = dict.fromkeys((target.base, target.arch))
    recorded = [proof for kind in kinds for proof in _recorded().get((kernel.name, kind), ())]
    found = [proof for proof in recorded if not proof.code or proof.code == kernel.code_hash()]
    order = (FAILED, *GRADES)
    found.sort(key=lambda proof: order.index(proof.grade))
    return tuple(found[:1] if found and found[0].grade == FAILED else found)


def best(kernel: Kernel, target: Target) -> Proof | None:
    """The best of `proofs`, None without a record."""
    return next(iter(proofs(kernel, target)), None)
