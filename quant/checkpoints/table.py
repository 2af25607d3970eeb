"""What the parameters of a model are made of: the tensors of a checkpoint, their shapes, how ranks share them. Data that a model family
declares; loading and writing checkpoints read it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from gristmill.quant.checkpoints.shards import Range, ShardSpec

Kind = Literal["linear", "kept", "fp32"]


@dataclass(frozen=True)
class Weight:
    """One parameter of a model. Sizes are those of the whole weight.

    Names leave out the ``.weight`` of a linear, in whose place a quantized checkpoint has tensors of its format.

    Attributes:
        target: its name in the model.
        sources: checkpoint names of the parts, joined along rows in this order (fused q/k/v, gate/up); with `experts`, each has ``{expert}``
            in it, and the experts are stacked in front.
        rows: the number of rows of each part.
        columns: the number of columns; None for a vector.
        kind: ``linear`` can be quantized, ``kept`` has the model's dtype, ``fp32`` is float32.
        experts: the number of experts; 0 = none.
        stacked: whether the one source holds all experts: quantized as [experts, N, K], in floats, under its bare name, as [experts, K, N].
        rows_first: whether a stacked source is [experts, N, K] in floats too.
        shard: how it is sharded; None = every rank has all of it.
        interleaved: whether gate and up alternate in the rows of a stacked source, or in the columns of its bias; it is returned with all of
            gate first.
    """

    target: str
    sources: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int | None = None
    kind: Kind = "kept"
    experts: int = 0
    stacked: bool = False
    shard: ShardSpec | None = None
    interleaved: bool = False
    rows_first: bool = False

    @property
    def stacked_shape(self) -> tuple[int, int, int]:
        """The shape of a stacked source in floats."""
        sizes = (self.rows[0], self.columns or 0)
        return (self.experts, *(sizes if self.rows_first else sizes[::-1]))

    def part_names(self, experts: Range | None = None) -> list[str]:
        """Names of the parts in the checkpoint, expert after expert; of a range of `experts`, None = all."""
        if not self.experts or self.stacked:
            return list(self.sources)
        indices = range(*(experts or (0, self.experts)))
        return [source.format(expert=expert) for expert in indices for source in self.sources]


TIED = ("lm_head.weight", "model.embed_tokens.weight")
"""A logits head that is tied to the embedding: the tensor that is read, and its copy."""


@dataclass(frozen=True)
class WeightTable:
    """All weights of a model, and patterns of checkpoint tensors that it ignores.

    Attributes:
        copies: (ignored tensor, tensor used in its place) pairs; a checkpoint with both must have equal ones.
    """

    weights: tuple[Weight, ...]
    ignored: tuple[str, ...] = ()
    copies: tuple[tuple[str, str], ...] = ()

    def ignores(self, name: str) -> bool:
        """Whether the table ignores a checkpoint tensor."""
        return any(
            fnmatchcase(name, pattern) for pattern in (*self.ignored, *(copy for copy, _ in self.copies))
        )

    def within(self, base: str, names: Iterable[str]) -> WeightTable:
        """This table for a checkpoint with these tensors, saved from the model alone, without its head: if no name begins with the module
        `base`, the table's do not either."""
        prefix = f"{base}."
        if not base or any(name.startswith(prefix) for name in names):
            return self

        def bare(name: str) -> str:
            return name.removeprefix(prefix)

        weights = (replace(weight, sources=tuple(map(bare, weight.sources))) for weight in self.weights)
        copies = ((bare(copy), bare(kept)) for copy, kept in self.copies)
        return WeightTable(tuple(weights), tuple(map(bare, self.ignored)), tuple(copies))
