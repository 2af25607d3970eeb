"""Verifications that come with gristmill: what the very code that runs here has matched on another device of the same model.

A record counts for the code that it names by `Kernel.verification_hash`, compiler and flags included, and for the device that it names by
`target_key`, product name included. Of kernels that are compiled where they run, such as Triton's, the toolchain must be the same too. It
lets a kernel run after a canary: one of the record's problems, for each kernel and configuration, is verified on this device first
(`gristmill.kernel_registry.select`). ``kernelbench store ship`` writes the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import AxisError
from gristmill.kernel_registry.store import SHIPPED, Store, Verification, config_key

BUILT = ("cpp", "cuda", "hip")
"""Languages whose code is compiled before it is shipped: the toolchain here has no part in it."""


@dataclass(frozen=True)
class Elsewhere:
    """A shipped record for a problem: the file that has it, and the problem of the canary of its kernel and configuration."""

    origin: str
    canary: str


@dataclass(frozen=True)
class ShippedVerifications:
    """The records of all files: {(operation, kernel, code, configuration, device): {problem: (record, file)}}."""

    records: Mapping[tuple[str, ...], Mapping[str, tuple[Verification, str]]]

    @staticmethod
    def read(folder: Path) -> ShippedVerifications:
        """The records of a folder. Those of failures are left out: such a kernel is verified here."""
        found: dict[tuple[str, ...], dict[str, tuple[Verification, str]]] = {}
        for path in sorted(folder.glob("*.json")):
            for record in Store.read(path).verifications.values():
                if record.ok:
                    key = (record.op, record.kernel, record.code, record.config, record.target)
                    found.setdefault(key, {})[record.problem] = (record, path.name)
        return ShippedVerifications(found)

    def find(
        self, op: Op, kernel: Kernel, config: Config, problem: str, place: tuple[str, str]
    ) -> Elsewhere | None:
        """The record for a problem of `Op.verification`, on a device with a toolchain (`place`); None if there is none that counts."""
        if not self.records:
            return None
        key = (op.name, kernel.name, kernel.verification_hash(config), config_key(config), place[0])
        problems = {
            text: origin
            for text, (record, origin) in self.records.get(key, {}).items()
            if kernel.language in BUILT or record.toolchain == place[1]
        }
        return Elsewhere(problems[problem], _smallest(op, problems)) if problem in problems else None


@cache
def shipped_verifications() -> ShippedVerifications:
    """The records under `SHIPPED`."""
    return ShippedVerifications.read(SHIPPED)


def _smallest(op: Op, problems: Mapping[str, str]) -> str:
    """The problem that moves the fewest bytes."""

    def nbytes(text: str) -> tuple[float, str]:
        try:
            return op.cost(op.problem(text)).bytes, text
        except AxisError:  # one that the operation no longer has
            return float("inf"), text

    return min(problems, key=nbytes)
