"""Layouts: named, versioned storage orders of a weight and its scales, owned by no kernel. Standard library only.

A layout is declared in a spec module of ``quant/layouts`` as ``LAYOUT = Layout(...)``; kernels name the layouts they
read, plans choose among them, and packing code is imported on first use.

    >>> from gristmill.kernel_registry.registry import default_registry
    >>> layout = default_registry().layout("plain_v1")
    >>> layout.slots
    ('codes', 'scales', 'zeros', 'row_scale', 'row_block', 'perm')
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gristmill.kernel_registry.scheme import QuantScheme


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One storage order.

    Attributes:
        name: with a version, ``plain_v1``. Any change of the order needs a new name.
        summary: one line for people.
        slots: names of the packed tensors, in the order in which they are passed to an operator as ``Tensor[]``. Every
            weight fills every slot: one that a scheme does not need is an empty tensor.
        schemes: names of the weight schemes it can hold (activations do not matter); integer schemes outside ALL_WEIGHT_SCHEMES too.
        any_integer: it also holds integer schemes of any width and group, with zero points or minimums.
        integers: it also holds the integer schemes for which this is true.
        pack: ``"module:attr"`` of ``pack(QuantTensor) -> Packed``.
        unpack: ``"module:attr"`` of ``unpack(Packed) -> QuantTensor``, the exact inverse.
        rows: ``"module:attr"`` of ``rows(Packed, index) -> Tensor``, the rows [T, K] that an int64 tensor [T] names, as the scheme's
            dtype or, of quantized schemes, float32; "" where rows cannot be read singly.
        size: ``size(scheme, n, k)`` -> bytes of all slots for an [n, k] weight without act-order.
        module: where it was declared; set when it is discovered.
    """

    name: str
    summary: str
    slots: tuple[str, ...]
    schemes: tuple[str, ...]
    pack: str
    unpack: str
    size: Callable[[QuantScheme, int, int], int] = field(repr=False)
    any_integer: bool = False
    integers: Callable[[QuantScheme], bool] | None = field(default=None, repr=False)
    rows: str = ""
    module: str = ""

    def __post_init__(self) -> None:
        for scheme in self.schemes:
            try:
                known = QuantScheme.parse(scheme).weights == scheme
            except ValueError:
                known = False
            if not known:
                raise ValueError(f"layout {self.name}: no weight scheme called {scheme}")
        for target in (self.pack, self.unpack, *([self.rows] if self.rows else [])):
            if target.count(":") != 1:
                raise ValueError(f"layout {self.name}: a target is 'module:attr', got {target!r}")

    def accepts(self, scheme: QuantScheme | str) -> bool:
        """Whether weights of this scheme can be packed in this layout."""
        return self.why_not(scheme) is None

    def why_not(self, scheme: QuantScheme | str) -> str | None:
        """None, or the reason why weights of this scheme cannot be packed in this layout."""
        parsed = QuantScheme.parse(scheme)
        if parsed.weights in self.schemes or (self.any_integer and parsed.is_integer):
            return None
        if self.integers is not None and self.integers(parsed):
            return None
        held = ", ".join((*self.schemes, *(["some integer groups"] if self.integers is not None else [])))
        return f"layout {self.name} holds {held}, not {parsed.weights}"

    def nbytes(self, scheme: QuantScheme | str, n: int, k: int) -> int:
        """Bytes of an [n, k] weight in this layout, padding included.

        Raises:
            ValueError: the layout does not hold the scheme.
        """
        scheme = QuantScheme.parse(scheme)
        reason = self.why_not(scheme)
        if reason is not None:
            raise ValueError(reason)
        return self.size(scheme, n, k)

    def load_pack(self) -> Callable[[Any], Any]:
        """The packing function, imported now."""
        return _load(self.pack)

    def load_unpack(self) -> Callable[[Any], Any]:
        """The inverse, imported now."""
        return _load(self.unpack)

    def load_rows(self) -> Callable[[Any, Any], Any] | None:
        """The function that reads single rows, imported now; None where the layout has none."""
        return _load(self.rows) if self.rows else None


def _load(target: str) -> Callable[..., Any]:
    module, _, attribute = target.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return function
