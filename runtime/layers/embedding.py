"""Token embedding and logits head, in floats unless the loader quantizes both."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill.quant import QuantTensor
from gristmill.quant.formats.contract import owned
from gristmill.quant.packed import Packed, row_reader
from gristmill.runtime.layers.linear import Linear
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.loader.weights import Weights


class Embedding:
    """Rows of a [vocab, hidden] matrix, dense or quantized, or of a packed one whose layout reads single rows."""

    def __init__(self, plans: Plans, weight: QuantTensor | Packed) -> None:
        self.weight: Tensor | QuantTensor | Packed = weight
        if isinstance(weight, QuantTensor) and weight.scheme.is_dense:
            self.weight = weight.dense()
        self._read_rows = row_reader(weight.layout) if isinstance(weight, Packed) else None
        self._dtype = plans.dtype
        if isinstance(self.weight, Tensor):
            plans.own(self.weight)
        elif isinstance(self.weight, QuantTensor):
            plans.own(*self.weight.tensors().values())

    def __call__(self, tokens: Tensor) -> Tensor:
        """int64 [tokens] -> [tokens, hidden]."""
        if isinstance(self.weight, Tensor):
            return torch.nn.functional.embedding(tokens, self.weight)
        if isinstance(self.weight, QuantTensor):
            return self.weight.decode_rows(tokens).to(self._dtype)
        if self._read_rows is None:
            raise ValueError(f"layout {self.weight.layout} does not read single rows")
        return self._read_rows(self.weight, tokens).to(self._dtype)


class LogitsHead(Linear):
    """Hidden states to logits, with a separate matrix or the embedding's (tied)."""


def embedding_and_head(plans: Plans, weights: Weights, tied: bool) -> tuple[Embedding, LogitsHead]:
    """The first and the last matrix of a model.

    A tied matrix is in memory once if its layout reads single rows, or is the matrix itself; else it is kept beside the packed one.
    """
    matrix = weights.vocabulary("embedding")
    if not tied:
        embedding = Embedding(plans, owned(matrix))
        return embedding, LogitsHead(plans, owned(weights.vocabulary("head")))
    head = LogitsHead(plans, matrix)
    for packed in head.weight.packed.values():
        if row_reader(packed.layout) is not None:
            return Embedding(plans, packed), head
    if not all(tensor.untyped_storage().resizable() for tensor in matrix.tensors().values()):
        matrix = owned(matrix)  # the mapped file is not kept
        head = LogitsHead(plans, matrix)
    return Embedding(plans, matrix), head
