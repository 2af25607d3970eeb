"""Packed weights: a QuantTensor in the storage order of a Layout, ready to be passed to an operator as Tensor[]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gristmill.kernel_registry.layout import Layout
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant.tensor import QuantTensor


@dataclass(frozen=True, eq=False)
class Packed:
    """One weight in one layout.

    Attributes:
        layout: the layout's name.
        scheme, shape: those of the QuantTensor; the shape is (..., N, K).
        slots: the tensors by name, in the layout's order; unused ones are empty.
        segments: the QuantTensor's.
        run_groups: with act-order, the QuantTensor's scale column of each packed group; else None.
        row_blocks: the QuantTensor's n_idx where a layout spreads block scales over rows; else None.
    """

    layout: str
    scheme: QuantScheme
    shape: tuple[int, ...]
    slots: Mapping[str, Tensor]
    segments: tuple[int, ...] = (0,)
    run_groups: tuple[int, ...] | None = None
    row_blocks: tuple[int, ...] | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """The slots in order, as operators take them."""
        return list(self.slots.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(t.numel() * t.element_size() for t in self.tensors)

    def to(self, device: torch.device | str) -> Packed:
        """The same on another device."""
        return replace(self, slots={name: t.to(device) for name, t in self.slots.items()})


class LayoutError(ValueError):
    """A weight that a layout cannot hold; `layout` is its name."""

    def __init__(self, layout: str, reason: str) -> None:
        super().__init__(reason)
        self.layout = layout


def pack(weight: QuantTensor, layout: Layout | str) -> Packed:
    """The weight in a layout, given as spec or name.

    Raises:
        LayoutError: the layout does not hold the weight's scheme, or this weight of it.
        LookupError: no layout of that name.
    """
    spec = _spec(layout)
    reason = spec.why_not(weight.scheme)
    if reason is not None:
        raise LayoutError(spec.name, reason)
    try:
        packed: Packed = spec.load_pack()(weight)
    except ValueError as error:
        raise LayoutError(spec.name, str(error)) from error
    return packed


def unpack(packed: Packed) -> QuantTensor:
    """The QuantTensor that was packed, bit for bit.

    Raises:
        ValueError: the slots contradict each other: a scale that rows share differs, or perm is no permutation.
    """
    weight: QuantTensor = _spec(packed.layout).load_unpack()(packed)
    return weight


def row_reader(layout: Layout | str) -> Callable[[Packed, Tensor], Tensor] | None:
    """A function from a packed weight and an int64 tensor [T] to the rows [T, K] that it names, in the dtype of a dense scheme, else
    float32. None: the layout does not read single rows.
    """
    return _spec(layout).load_rows()


def _spec(layout: Layout | str) -> Layout:
    if isinstance(layout, Layout):
        return layout
    from gristmill.kernel_registry.registry import default_registry

    return default_registry().layout(layout)
