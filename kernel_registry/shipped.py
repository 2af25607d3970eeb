"""Verifications that come with gristmill: what the very code that runs here has matched on another device of the same model.

A record counts for the code that it names by `Kernel.verification_hash`, compiler and flags included, and for the device that it names by
`target_key`, product name included. Of kernels that are compiled where they run, such as Triton's, the toolchain must be the same too. It
lets a kernel run after a canary: one of the record's problems, for each kernel and configuration, is verified on this device first
(`gristmill.kernel_registry.select`). ``kernelbench store ship`` writes the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import AxisError
from gristmill.kernel_registry.store import Store, Verification, config_key, shipped_files

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
    _canaries: dict[tuple[str, ...], str] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of(stores: Mapping[str, Store]) -> ShippedVerifications:
        """The records of files, by name. Those of failures are left out: such a kernel is verified here."""
        found: dict[tuple[str, ...], dict[str, tuple[Verification, str]]] = {}
        for name, store in stores.items():
            for record in store.verifications.values():
                if record.ok:
                    key = (record.op, record.kernel, record.code, record.config, record.target)
                    found.setdefault(key, {})[record.problem] = (record, name)
        return ShippedVerifications(found)

    def find(
        self, op: Op, kernel: Kernel, config: Config, problem: str, place: tuple[str, str]
    ) -> Elsewhere | None:
        """The record for a problem of `Op.verification`, on a device with a toolchain (`place`); None if there is none that counts."""
        if not self.records:
            return None
        key = (op.name, kernel.name, kernel.verification_hash(config), config_key(config), place[0])
        toolchain = "" if kernel.language in BUILT else place[1]
        problems = {
            text: origin
            for text, (record, origin) in self.records.get(key, {}).items()
            if toolchain in ("", record.toolchain)
        }
        if problem not in problems:
            return None
        known = (*key, toolchain)
        if known not in self._canaries:
            self._canaries[known] = _smallest(op, problems)
        return Elsewhere(problems[problem], self._canaries[known])


@cache
def shipped_verifications() -> ShippedVerifications:
    """The records of `shipped_files`."""
    return ShippedVerifications.of(shipped_files())


def _smallest(op: Op, problems: Mapping[str, str]) -> str:
    """The problem that moves the fewest bytes."""

    def nbytes(text: str) -> tuple[float, str]:
        try:
            return op.cost(op.problem(text)).bytes, text
        except AxisError:  # one that the operation no longer has
            return float("inf"), text

    return min(problems, key=nbytes)
