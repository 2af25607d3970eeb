"""Token embedding and logits head: as they are stored, or as the loader quantizes both."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gristmill.quant import QuantTensor
from gristmill.quant.checkpoints.shards import Range
from gristmill.quant.checkpoints.weights import Weights
from gristmill.quant.formats.contract import owned
from gristmill.quant.packed import Packed, row_reader
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.layers.codes import Codes
from gristmill.runtime.layers.linear import AllReduce, Linear
from gristmill.runtime.layers.plans import Plans


class Embedding:
    """Rows of a [vocab, hidden] matrix, dense or quantized, or of a packed one whose layout reads single rows.

    Args:
        ranges: the token ids of each rank, whose rows are those of the matrix; one range = all token ids.
        scale: a factor of the rows, which is rounded to their dtype, as Gemma's is.
    """

    def __init__(
        self, plans: Plans, weight: QuantTensor | Packed, ranges: list[Range], scale: float = 1.0
    ) -> None:
        self.scale = torch.tensor(scale, dtype=plans.dtype).item()
        self.weight: Tensor | QuantTensor | Packed = weight
        if isinstance(weight, QuantTensor) and weight.scheme.is_dense:
            self.weight = weight.dense()
        self._read_rows = row_reader(weight.layout) if isinstance(weight, Packed) else None
        self._dtype = plans.dtype
        self._range = ranges[plans.mesh.rank]
        self._all_reduce = AllReduce(plans, weight.shape[-1]) if len(ranges) > 1 else None
        if isinstance(self.weight, Tensor):
            plans.own(self.weight)
        elif isinstance(self.weight, QuantTensor):
            plans.own(*self.weight.tensors().values())

    def __call__(self, tokens: Tensor) -> Tensor:
        """int64 [tokens] -> [tokens, hidden]."""
        if self._all_reduce is None:
            return self._rows(tokens)
        first, last = self._range
        rows = self._rows((tokens - first).clamp_(0, last - first - 1))
        outside = (tokens < first) | (tokens >= last)
        return self._all_reduce(rows.masked_fill_(outside[:, None], 0))

    def _rows(self, tokens: Tensor) -> Tensor:
        rows = self._stored_rows(tokens)
        return rows if self.scale == 1 else rows * self.scale

    def _stored_rows(self, tokens: Tensor) -> Tensor:
        if isinstance(self.weight, Tensor):
            return torch.nn.functional.embedding(tokens, self.weight)
        if isinstance(self.weight, QuantTensor):
            return self.weight.decode_rows(tokens).to(self._dtype)
        if self._read_rows is None:
            raise ValueError(f"layout {self.weight.layout} does not read single rows")
        return self._read_rows(self.weight, tokens).to(self._dtype)


class LogitsHead(Linear):
    """Hidden states to logits, with a separate matrix or the embedding's (tied). `ranges` are as in `Embedding`, `declared` is as in `Linear`.
    `scale` is a factor of the logits, `cap` their soft cap, as in `ModelConfig`."""

    def __init__(
        self,
        plans: Plans,
        weight: QuantTensor,
        ranges: list[Range],
        declared: str | None = None,
        scale: float = 1.0,
        cap: float = 0.0,
    ) -> None:
        super().__init__(plans, weight, declared=declared)
        self.scale, self.cap = scale, cap
        self.counts = [last - first for first, last in ranges]
        self.widest, world = max(self.counts), plans.mesh.world
        self.gather = None
        if world > 1:
            self.gather = plans.bind("all_gather", n=self.widest, x=plans.x, world=world)

    def __call__(self, x: Tensor | Codes, out: Tensor | None = None) -> Tensor:
        """x [rows, hidden] -> [rows, vocab]; in `out`, contiguous, if it is given."""
        logits = self._gathered(x, out)
        if self.scale != 1:
            logits.mul_(self.scale)
        return logits.div_(self.cap).tanh_().mul_(self.cap) if self.cap else logits

    def _gathered(self, x: Tensor | Codes, out: Tensor | None) -> Tensor:
        if self.gather is None:
            return super().__call__(x, out)
        logits = super().__call__(x)
        mesh, (rows, count) = self.plans.mesh, logits.shape
        if count < self.widest:
            logits = torch.nn.functional.pad(logits, (0, self.widest - count))
        even = min(self.counts) == self.widest
        gathered = out if even and out is not None else logits.new_empty(rows, mesh.world * self.widest)
        self.gather(logits, mesh.group, mesh.world, gathered)
        if even:
            return gathered
        of_ranks = zip(gathered.split(self.widest, 1), self.counts, strict=True)
        return torch.cat([columns[:, :width] for columns, width in of_ranks], 1, out=out)


def embedding_and_head(plans: Plans, weights: Weights, c: ModelConfig) -> tuple[Embedding, LogitsHead]:
    """The first and the last matrix of a model.

    A tied matrix is in memory once if its layout reads single rows, or is the matrix itself; else it is kept next to the packed one.
    """
    part, ranges = weights.vocabulary("embedding"), weights.shard_ranges("embedding")
    matrix = part.weight
    embedding_of = partial(Embedding, plans, scale=c.embedding_scale)
    head_of = partial(LogitsHead, plans, scale=c.logit_scale, cap=c.logit_cap)
    if not c.tie_embeddings:
        embedding = embedding_of(owned(matrix), ranges)
        part, ranges = weights.vocabulary("head"), weights.shard_ranges("head")
        return embedding, head_of(owned(part.weight), ranges, part.declared)
    head = head_of(matrix, ranges, part.declared)
    for packed in head.weight.packed.values():
        if row_reader(packed.layout) is not None:
            return embedding_of(packed, ranges), head
    if not all(tensor.untyped_storage().resizable() for tensor in matrix.tensors().values()):
        matrix = owned(matrix)  # the mapped file is not kept
        head = head_of(matrix, ranges, part.declared)
    return embedding_of(matrix, ranges), head


def embedding_alone(plans: Plans, weights: Weights, c: ModelConfig) -> Embedding:
    """The first matrix of a model that has no logits head."""
    part, ranges = weights.vocabulary("embedding"), weights.shard_ranges("embedding")
    return Embedding(plans, owned(part.weight), ranges, c.embedding_scale)
