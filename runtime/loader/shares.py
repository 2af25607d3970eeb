"""The share of a rank in a weight: which rows, columns and experts it keeps, of float tensors and of quantized ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant import QuantTensor, concat
from gristmill.runtime.parallel.cuts import Cut, Range, of_parts
from gristmill.runtime.parallel.mesh import Mesh


@dataclass(frozen=True)
class Share:
    """rows: of each part, the ranges that a rank keeps, in order. columns: None = all. experts: a range of their indices."""

    rows: tuple[tuple[Range, ...], ...]
    columns: Range | None = None
    experts: Range = (0, 0)

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Rows of each part."""
        return tuple(sum(last - first for first, last in ranges) for ranges in self.rows)


def share_of(cut: Cut | None, rows: tuple[int, ...], experts: int, mesh: Mesh) -> Share:
    """The share of a rank. rows: of each part; experts: of each of them, 0 = no experts."""
    whole = Share(tuple(((0, count),) for count in rows), None, (0, experts))
    if cut is None or mesh.world == 1:
        return whole
    ranges = cut.ranges(mesh)
    if cut.dim == "rows":
        return replace(whole, rows=tuple(map(tuple, of_parts(ranges, rows))))
    (only,) = ranges
    return replace(whole, columns=only) if cut.dim == "columns" else replace(whole, experts=only)


def float_share(tensor: Tensor, rows: tuple[Range, ...], columns: Range | None = None) -> Tensor:
    """The share of [N, ...] or, of columns, [N, K]: a view where it is one range of rows, so that only that range is read."""
    pieces = [tensor[first:last] for first, last in rows]
    kept = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return kept if columns is None else kept[:, columns[0] : columns[1]].contiguous()


def quant_share(weight: QuantTensor, rows: tuple[Range, ...], columns: Range | None = None) -> QuantTensor:
    """The share of a quantized [N, K], exactly; the weight itself if it is all of it."""
    if columns is not None and columns != (0, weight.k):
        weight = weight.narrow(-1, columns[0], columns[1] - columns[0])
    if rows == ((0, weight.n),):
        return weight
    return concat([weight.narrow(-2, first, last - first) for first, last in rows], -2)


def rounds_rows_alone(scheme: QuantScheme) -> bool:
    """Whether a row is rounded to the same codes without the other rows: it shares no scale with them."""
    return scheme.granularity in ("group", "channel") and not scheme.has_global
