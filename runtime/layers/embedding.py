"""Token embedding and logits head, in floats unless the loader quantizes both."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gristmill.quant import QuantTensor
from gristmill.quant.formats.contract import owned
from gristmill.quant.packed import row_reader
from gristmill.runtime.layers.linear import Linear
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.loader.weights import Weights


class Embedding:
    """Rows of a [vocab, hidden] matrix.

    rows: int64 [tokens] -> the rows of these tokens. held: the tensors that it reads.
    """

    def __init__(self, plans: Plans, rows: Callable[[Tensor], Tensor], held: list[Tensor]) -> None:
        self._rows = rows
        self._dtype = plans.dtype
        plans.own(*held)

    @classmethod
    def of(cls, plans: Plans, weight: QuantTensor) -> Embedding:
        """The embedding of a matrix, dense or quantized."""
        if not weight.scheme.is_dense:
            return cls(plans, weight.decode_rows, list(weight.tensors().values()))
        matrix = weight.dense()
        return cls(plans, lambda tokens: torch.nn.functional.embedding(tokens, matrix), [matrix])

    def __call__(self, tokens: Tensor) -> Tensor:
        """int64 [tokens] -> [tokens, hidden]."""
        return self._rows(tokens).to(self._dtype)


class LogitsHead(Linear):
    """Hidden states to logits, with a separate matrix or the embedding's (tied)."""


def embedding_and_head(plans: Plans, weights: Weights, tied: bool) -> tuple[Embedding, LogitsHead]:
    """The first and the last matrix of a model.

    A tied matrix is in memory once if its layout reads single rows, or is the matrix itself; else it is kept beside the packed one.
    """
    matrix = weights.vocabulary("embedding")
    if not tied:
        embedding = Embedding.of(plans, owned(matrix))
        return embedding, LogitsHead(plans, owned(weights.vocabulary("head")))
    head = LogitsHead(plans, matrix)
    for packed in head.weight.packed.values():
        rows = row_reader(packed)
        if rows is not None:
            return Embedding(plans, rows, []), head
    if not all(tensor.untyped_storage().resizable() for tensor in matrix.tensors().values()):
        matrix = owned(matrix)  # the mapped file is not kept
        head = LogitsHead(plans, matrix)
    return Embedding.of(plans, matrix), head
