"""Packing of dense_v1: the float weight itself."""

from __future__ import annotations

from gristmill.quant.packed import Packed
from gristmill.quant.tensor import QuantTensor


def pack(weight: QuantTensor) -> Packed:
    """Shares memory with the weight where alignment allows."""
    return Packed("dense_v1", weight.scheme, weight.shape, {"weight": weight.dense()})


def unpack(packed: Packed) -> QuantTensor:
    """Inverse of pack."""
    return QuantTensor.from_dense(packed.slots["weight"])
