"""From a checkpoint to a model's parameters by a declared table, one tensor at a time, quantized on the way if asked.

A model declares its `Weight`s: which checkpoint tensors make which parameter, and their shapes. `Weights` hands them out
once each, and in the end tells what was never asked for and what nobody read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant import QuantTensor, concat, quantize, stack
from gristmill.runtime.errors import CheckpointError
from gristmill.runtime.loader.checkpoint import Checkpoint
from gristmill.runtime.loader.quantized import read_quantized

Kind = Literal["linear", "kept", "fp32"]


@dataclass(frozen=True)
class Weight:
    """One parameter of a model.

    target: its name in the model. sources: checkpoint names of the parts, joined along rows in this order (fused q/k/v,
    gate/up); with `experts`, each has ``{expert}`` in it and the experts are stacked in front. rows: of each part.
    columns: None for a vector. kind: ``linear`` can be quantized, ``kept`` has the model's dtype, ``fp32`` is float32.
    Names leave out the ``.weight`` of a linear, in whose place a quantized checkpoint has ``.codes`` and its other fields.
    """

    target: str
    sources: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int | None = None
    kind: Kind = "kept"
    experts: int = 0

    def part_names(self) -> list[str]:
        """Names of the parts in the checkpoint, expert after expert."""
        if not self.experts:
            return list(self.sources)
        return [source.format(expert=expert) for expert in range(self.experts) for source in self.sources]


@dataclass(frozen=True)
class WeightTable:
    """All weights of a model, and patterns of checkpoint tensors that it knowingly leaves aside."""

    weights: tuple[Weight, ...]
    ignored: tuple[str, ...] = ()

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint tensor is left aside by rule."""
        return any(fnmatchcase(name, pattern) for pattern in self.ignored)


class Weights:
    """Hands out the parameters of a table from a checkpoint.

    dtype: what kept and unquantized weights become. scheme: quantize linear weights so at load; None = not.
    stored: scheme of a checkpoint that gristmill quantized; None = a plain one. device: where parameters go.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        table: WeightTable,
        dtype: torch.dtype,
        device: torch.device,
        scheme: QuantScheme | None = None,
        stored: QuantScheme | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.table = table
        self.dtype = dtype
        self.device = device
        self.scheme = scheme
        self.stored = stored
        self._pending = {weight.target: weight for weight in table.weights}
        self._read: set[str] = set()

    def tensor(self, target: str) -> Tensor:
        """A kept parameter, on the device."""
        weight = self._take(target)
        parts = []
        for name, rows in zip(weight.sources, weight.rows, strict=True):
            shape = (rows,) if weight.columns is None else (rows, weight.columns)
            parts.append(self._source(name, shape, weight).to(torch.float32 if weight.kind == "fp32" else self.dtype))
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined.to(self.device, copy=True)

    def optional(self, target: str) -> Tensor | None:
        """A kept parameter that the table may not have, such as a bias."""
        return self.tensor(target) if target in self._pending else None

    def linear(self, target: str) -> QuantTensor:
        """A linear parameter [N, K], or [experts, N, K], on the device: quantized, or dense in the model's dtype."""
        weight = self._take(target)
        names, parts = weight.part_names(), len(weight.sources)
        made = [self._part(name, weight.rows[index % parts], weight) for index, name in enumerate(names)]
        fused = [concat(made[start : start + parts], -2) for start in range(0, len(made), parts)]
        return (stack(fused) if weight.experts else fused[0]).to(self.device)

    def finish(self) -> None:
        """CheckpointError if a parameter was left unwritten, or if a tensor was read by nobody."""
        if self._pending:
            raise CheckpointError(f"parameters left unwritten: {_some(self._pending)}")
        unread = [n for n in self.checkpoint if n not in self._read and not self.table.ignores(n)]
        if unread:
            raise CheckpointError(
                f"{self.checkpoint.directory} holds tensors that no parameter of the model takes: {_some(unread)}"
            )

    def _take(self, target: str) -> Weight:
        weight = self._pending.pop(target, None)
        if weight is None:
            raise KeyError(f"no weight {target!r} in the model's table, or it was taken before")
        return weight

    def _source(self, name: str, shape: tuple[int, ...], weight: Weight) -> Tensor:
        if name not in self.checkpoint:
            raise CheckpointError(
                f"parameter {weight.target} is left unwritten: {self.checkpoint.directory} has no tensor {name}"
            )
        self._read.add(name)
        return self.checkpoint.read(name, shape, floating=True)

    def _part(self, name: str, rows: int, weight: Weight) -> QuantTensor:
        columns = weight.columns
        if columns is None:
            raise KeyError(f"weight {weight.target} of the model's table is linear and has no columns")
        if self.stored is not None:
            found, read = read_quantized(self.checkpoint, name, (rows, columns), self.stored)
            self._read.update(read)
            return found
        tensor = self._source(f"{name}.weight", (rows, columns), weight)
        if self.scheme is None or self.scheme.is_dense:
            return QuantTensor.from_dense(tensor.to(self.dtype, copy=True))
        return quantize_part(name, tensor, self.scheme)


def quantize_part(name: str, tensor: Tensor, scheme: QuantScheme) -> QuantTensor:
    """One checkpoint tensor rounded to nearest; CheckpointError names it where the scheme cannot hold it."""
    try:
        return quantize(tensor, scheme)
    except ValueError as error:
        raise CheckpointError(f"{name}.weight: {error}") from error


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
    return ", ".join(listed[:5]) + more
