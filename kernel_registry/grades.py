"""Grades of proof: what shows that a kernel computes what its operation says on a target, best first.

``here`` is a record of the store, made by the first use (`Resolver`). The other grades come from ``grades.json``, which
``python ci/generate.py`` derives from proof reports (`kernelbench prove`), tests, and the baseline of the compile matrix, and
CI compares with them. Without a record there is no grade. A record names the hash of the kernel's code and the code levels that it is about:
architectures of GPUs, ISA levels of CPUs. It counts for a kernel while the code has that hash, and on no other level: for the kernel, or,
if it was wrong there, against it and every other grade.
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
    "newer": "the same PTX executed on a newer GPU",
    "interpreted": "its source or PTX executed on a CPU, by Triton's interpreter, as C++ or by a model of PTX",
    "compiled": "compiled for the target, machine code checked",
}
"""Grade -> its meaning, best first."""
FAILED = "failed"
"""In place of a grade: it did not match the reference on another device of the same kind. No policy can name it."""
RECORDS = Path(__file__).with_name("grades.json")


@dataclass(frozen=True)
class Proof:
    """What one record says of a kernel on one code level.

    Attributes:
        grade: one of `GRADES`, or `FAILED`.
        record: the file that is the evidence, relative to the repository.
        code: the hash of the code that it counts for.
        ran: for ``newer``, the code that ran and where, ``compute_80 on sm_90``.
        spills: the most bytes per thread that the kernel's compiled cases keep in memory on this level for want of registers.
    """

    grade: str
    record: str
    code: str
    ran: str = ""
    spills: int = 0

    def __str__(self) -> str:
        label = "wrong elsewhere" if self.grade == FAILED else self.grade
        record = f"{self.record}: {self.ran}" if self.ran else self.record
        return f"{label} ({record})" + (f", spills {self.spills} bytes per thread" if self.spills else "")


@cache
def _recorded() -> dict[tuple[str, str], tuple[Proof, ...]]:
    """(kernel, code level) -> its proofs."""
    table = json.loads(RECORDS.read_text(encoding="utf-8"))
    spills = {
        (kernel, level): size
        for kernels in table.get("compiled", {}).values()
        for kernel, entry in kernels.items()
        for level, size in entry.get("spills", {}).items()
    }
    found: dict[tuple[str, str], list[Proof]] = {}
    for grade in (FAILED, *GRADES):
        for record, kernels in table.get(grade, {}).items():
            for kernel, entry in kernels.items():
                for level in entry["on"]:
                    spilled = spills.get((kernel, level), 0)
                    proof = Proof(grade, record, entry["code"], entry.get("ran", ""), spilled)
                    found.setdefault((kernel, level), []).append(proof)
    return {key: tuple(proofs) for key, proofs in found.items()}


def level_of(target: Target) -> str:
    """The code level of a target, as records name it: the architecture of a GPU, the best level that a CPU runs."""
    return target.levels[0] if target.levels else target.arch


def proofs(kernel: Kernel, target: Target) -> tuple[Proof, ...]:
    """What is recorded for a kernel, with its present code, on a target, best first; only the failure if it failed there.

    Without the store, which alone knows ``here``. Of a CPU the target's level counts: where the installation has only code of a lower one,
    pass a target of that level.
    """
    recorded = _recorded().get((kernel.name, level_of(target)), ())
    found = [proof for proof in recorded if proof.code == kernel.code_hash()]
    order = (FAILED, *GRADES)
    found.sort(key=lambda proof: order.index(proof.grade))
    return tuple(found[:1] if found and found[0].grade == FAILED else found)


def best(kernel: Kernel, target: Target) -> Proof | None:
    """The best of `proofs`, None without a record."""
    return next(iter(proofs(kernel, target)), None)
