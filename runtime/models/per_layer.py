"""Decoders whose layers add vectors of the token after their blocks (per-layer embeddings), and scale the residual stream by a stored number.

`extra` of the configuration has ``vector_size``, the length of a vector, 0 = there are none, and ``vector_rows``, the tokens that have some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from torch import Tensor

from gristmill.quant.checkpoints.shards import ShardSpec
from gristmill.quant.checkpoints.table import Weight
from gristmill.quant.checkpoints.weights import Weights
from gristmill.runtime.batch import Batch
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.layers.linear import PartialSum
from gristmill.runtime.layers.per_layer import PerLayerEmbedding, PerLayerInput
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.layers.rope import Rope
from gristmill.runtime.models import llama
from gristmill.runtime.models.llama import Llama, norm
from gristmill.runtime.sequences import Sequences


def layer_weights(c: ModelConfig, name: str, source: str) -> Iterator[Weight]:
    """What a layer has beside its blocks."""
    size, to = c.extra["vector_size"], f"{name}.vector"
    yield Weight(f"{name}.scale", (f"{source}.layer_scalar",), (1,))
    if size:
        gate, out = f"{source}.per_layer_input_gate", f"{source}.per_layer_projection"
        yield Weight(f"{to}.gate", (gate,), (size,), c.hidden_size, "linear")
        yield Weight(f"{to}.projection", (out,), (c.hidden_size,), size, "linear")
        yield norm(c, f"{to}.norm", f"{source}.post_per_layer_input_norm")


def model_weights(c: ModelConfig) -> Iterator[Weight]:
    """What makes the vectors of all layers."""
    size, rows = c.extra["vector_size"], c.extra["vector_rows"]
    if size:
        every, names = c.num_layers * size, ("model.embed_tokens_per_layer.weight",)
        yield Weight("vectors.embedding", names, (rows,), every, shard=ShardSpec.rows(rows, unit=1))
        projection = ("model.per_layer_model_projection.weight",)
        yield Weight("vectors.projection", projection, (every,), c.hidden_size)
        yield norm(c, "vectors.norm", "model.per_layer_projection_norm", size)


class Layer(llama.Layer):
    """A layer that adds its vectors, and scales all of the residual stream."""

    def __init__(self, c: ModelConfig, weights: Weights, plans: Plans, index: int, rope: Rope) -> None:
        super().__init__(c, weights, plans, index, rope)
        name, size = f"layers.{index}", c.extra["vector_size"]
        self.scale = weights.tensor(f"{name}.scale")
        plans.own(self.scale)
        self.vector = PerLayerInput(plans, weights, f"{name}.vector", c, size) if size else None

    def __call__(
        self,
        x: Tensor | PartialSum,
        residual: Tensor,
        batch: Batch | Sequences,
        cache: tuple[Tensor, ...],
        vectors: Tensor | None = None,
    ) -> Tensor:
        """As of `llama.Layer`, with the layer's vectors [tokens, size]."""
        x = super().__call__(x, residual, batch, cache)
        if isinstance(x, PartialSum):
            raise ValueError("a partial sum over ranks, which a norm on the block's output takes complete")
        if self.vector is not None and vectors is not None:
            x = self.vector(residual.add_(x), vectors)
        residual.mul_(self.scale)
        return x.mul_(self.scale)


class PerLayerDecoder(Llama):
    """A model of such layers."""

    make_layer: ClassVar[Callable[..., Any]] = Layer

    def __init__(self, config: ModelConfig, weights: Weights, plans: Plans) -> None:
        super().__init__(config, weights, plans)
        size = config.extra["vector_size"]
        self.vectors = PerLayerEmbedding(plans, weights, "vectors", config, size) if size else None

    def layer_inputs(self, tokens: Tensor, embedded: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """The vectors of the tokens for each layer."""
        if self.vectors is None:
            return super().layer_inputs(tokens, embedded)
        return [(vectors,) for vectors in self.vectors(tokens, embedded).unbind(1)]
