"""Processing logits by torch: the reference, some rows at a time, because its steps take ten times their memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.sampling.process_logits import reference

if TYPE_CHECKING:
    from gristmill.kernels.calls import ProcessLogitsCall

ROWS = 64
"""Rows at a time."""


def launch(config: Config, call: ProcessLogitsCall) -> None:
    """The arguments of `process_logits.reference`."""
    for first in range(0, len(call.places), ROWS):
        some = slice(first, first + ROWS)
        call.out[some], call.largest[:, some] = reference(
            call.logits,
            call.places[some],
            call.fed,
            call.slots[some],
            call.penalties[:, some],
            call.seen,
            call.bias,
            call.counted[some],
            call.barred[some],
            call.mask,
            call.mask_rows[some],
        )


KERNEL = Kernel(
    op="process_logits",
    name="process_logits_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="torch's operations, 64 rows at a time",
    batch_invariant=True,
)
