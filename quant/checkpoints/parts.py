"""The parts of a linear weight, as they are read from a checkpoint, and the memory of parts that become one matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant import QuantTensor, memory, quantize
from gristmill.quant.errors import CheckpointError
from gristmill.quant.formats.contract import new_codes


@dataclass(frozen=True, eq=False)
class Part:
    """A linear weight [N, K] on the device, and the pre_scale of x, [K] in the model's dtype, or None.

    `declared` is the activation format that the checkpoint declares for it; None if there is none, or a scheme was requested.
    """

    weight: QuantTensor
    pre_scale: Tensor | None = None
    declared: str | None = None


class Joined:
    """The codes of parts that become one matrix, `rows` of each, in one tensor on the device if they have equal widths.

    Parts come in order. The reader of a part writes its codes to their `place`, or passes them to `put`, so that no part is in
    memory twice. `codes` are those of all parts, None if one does not fit.
    """

    def __init__(self, rows: Sequence[int], device: torch.device) -> None:
        self.device = device
        self.codes: Tensor | None = None
        self._rows = sum(rows)
        self._start = 0
        self._apart = False

    def place(self, shape: tuple[int, ...]) -> Tensor:
        """CPU memory for the codes of the next part."""
        rows = self._next(shape) if self.device.type == "cpu" else None
        return new_codes(shape) if rows is None else rows

    def put(self, codes: Tensor) -> Tensor:
        """Put the codes of the next part on the device."""
        rows = self._next(tuple(codes.shape))
        if rows is None:
            self.codes, self._apart = None, True
            return codes.to(self.device)
        self._start += rows.shape[0]
        return rows if rows.data_ptr() == codes.data_ptr() else rows.copy_(codes)

    def _next(self, shape: tuple[int, ...]) -> Tensor | None:
        if self._apart or self._start + shape[0] > self._rows:
            return None
        if self.codes is None:
            self.codes = memory.empty((self._rows, *shape[1:]), torch.uint8, self.device)
        return self.codes[self._start : self._start + shape[0]] if self.codes.shape[1:] == shape[1:] else None


def common_format(formats: set[str | None]) -> str | None:
    """The activation format that all parts declare; None if they differ, or declare none."""
    return next(iter(formats)) if len(formats) == 1 else None


def quantize_part(name: str, tensor: Tensor, scheme: QuantScheme) -> QuantTensor:
    """One checkpoint tensor rounded to nearest; CheckpointError if the scheme cannot represent it."""
    try:
        return quantize(tensor, scheme)
    except ValueError as error:
        raise CheckpointError(f"{name}.weight: {error}") from error
