"""A weight as a layer keeps it: packed in the layouts of its plan, with the arguments that the `linear` operation needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gristmill.kernel_registry.dtypes import canonical_dtype
from gristmill.kernel_registry.scheme import QuantScheme

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gristmill.quant.packed import Packed
    from gristmill.quant.tensor import QuantTensor


@dataclass(frozen=True, eq=False)
class LinearWeight:
    """One [N, K] weight in one or more layouts.

    A layer packs for the layouts of its plan, binds the plan for `problem(...)` with `layouts`, and passes `tensors()` and `n`
    with every call.

    Attributes:
        scheme: how the numbers are stored.
        n, k: rows (output features) and columns (input features).
        act_order: the order of columns does not follow the groups.
        packed: layout name -> the weight in it.
    """

    scheme: QuantScheme
    n: int
    k: int
    act_order: bool
    packed: Mapping[str, Packed]

    @staticmethod
    def pack(weight: QuantTensor | Tensor, layouts: Iterable[str]) -> LinearWeight:
        """Pack a QuantTensor (or a dense [N, K] tensor) in each of `layouts`; the QuantTensor may be dropped afterwards.

        Raises:
            ValueError: no layout is given, a layout does not support the scheme, or the weight is not [N, K].
            UnknownError: an unknown layout.
        """
        from gristmill.kernels.linear.op import as_quant
        from gristmill.quant.packed import pack

        weight, names = as_quant(weight), list(layouts)
        if weight.lead:
            raise ValueError(f"LinearWeight holds one [N, K] matrix, got {weight}")
        if not names:
            raise ValueError("LinearWeight needs at least one layout: those of the layer's plan")
        packed = {name: pack(weight, name) for name in names}
        return LinearWeight(weight.scheme, weight.n, weight.k, weight.g_idx is not None, packed)

    def problem(
        self, x: torch.dtype | str, *, bias: bool = False, residual: bool = False, silu_mul: bool = False
    ) -> str:
        """The static problem of a layer with this weight, for activations of dtype `x` (``bfloat16``, a torch.dtype)."""
        return problem_of(self.scheme, self.n, self.k, x, bias, residual, silu_mul, self.act_order)

    def tensors(self, layout: str | None = None) -> list[Tensor]:
        """The tensors of a layout; None: of all of them, in the order of their names, as a plan over them takes a weight.

        Raises:
            ValueError: the weight is not packed in that layout.
        """
        if layout is None:
            return [tensor for name in sorted(self.packed) for tensor in self.packed[name].tensors]
        if layout not in self.packed:
            raise ValueError(f"this weight is packed as {', '.join(self.packed)}, not as {layout}")
        return self.packed[layout].tensors

    @property
    def layouts(self) -> frozenset[str]:
        """The layouts of the packed weight, for binding its plan."""
        return frozenset(self.packed)

    @property
    def nbytes(self) -> int:
        """Bytes of all packings."""
        return sum(packed.nbytes for packed in self.packed.values())


def problem_of(
    scheme: QuantScheme | str,
    n: int,
    k: int,
    x: torch.dtype | str,
    bias: bool = False,
    residual: bool = False,
    silu_mul: bool = False,
    act_order: bool = False,
) -> str:
    """The static problem text of a linear layer before its weight exists."""
    flags = [name for name, on in (("bias", bias), ("residual", residual), ("silu_mul", silu_mul)) if on]
    text = f"n={n},k={k},x={canonical_dtype(x)},w={scheme},epilogue={'+'.join(flags) or 'none'}"
    return text + (",act_order=true" if act_order else "")
