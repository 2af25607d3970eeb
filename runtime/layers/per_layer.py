"""Per-layer embeddings (Gemma 3n, 2025; Gemma 4): each layer adds something of the token itself to the residual stream.

One table has a vector per token and layer. The vector is joined with a projection of the token's embedding; a gate of the residual stream
multiplies it in its layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill.quant import QuantTensor
from gristmill.quant.checkpoints.weights import Weights
from gristmill.quant.formats.contract import owned
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.layers.embedding import Embedding
from gristmill.runtime.layers.linear import Linear, load_linear
from gristmill.runtime.layers.norm import load_norm
from gristmill.runtime.layers.plans import Plans


class PerLayerEmbedding:
    """The vectors of tokens for all layers, of a table that is in memory as the embedding is, and a projection in floats. `size` is the length of a
    vector."""

    def __init__(self, plans: Plans, weights: Weights, name: str, c: ModelConfig, size: int) -> None:
        self.layers, self.size, self.scale = c.num_layers, size, c.hidden_size**-0.5
        part, ranges = weights.vocabulary(f"{name}.embedding"), weights.shard_ranges(f"{name}.embedding")
        self.embedding = Embedding(plans, owned(part.weight), ranges, size**0.5)
        projection = QuantTensor.from_dense(weights.tensor(f"{name}.projection"))
        self.projection = Linear(plans, projection, target=f"{name}.projection")
        self.norm = load_norm(plans, weights, f"{name}.norm", c)

    def __call__(self, tokens: Tensor, embedded: Tensor) -> Tensor:
        """int64 [tokens] and their embeddings [tokens, hidden] -> [tokens, layers, size]."""
        projected = self.projection(embedded).mul_(self.scale)
        normed = self.norm(projected.view(-1, self.size))
        vectors = self.embedding(tokens).view(-1, self.size)
        return normed.add_(vectors).mul_(0.5**0.5).view(-1, self.layers, self.size)


class PerLayerInput:
    """What a layer adds for its vectors: norm(W · (gelu(V · x) · vector)). `size` is the length of a vector."""

    def __init__(self, plans: Plans, weights: Weights, name: str, c: ModelConfig, size: int) -> None:
        self.gate = load_linear(plans, weights, f"{name}.gate")
        self.projection = load_linear(plans, weights, f"{name}.projection")
        self.norm = load_norm(plans, weights, f"{name}.norm", c)
        self.gelu = plans.bind("gelu_and_mul", n=size, x=plans.x, approximate="tanh")

    def __call__(self, x: Tensor, vectors: Tensor) -> Tensor:
        """The residual stream x [tokens, hidden] and vectors [tokens, size] -> [tokens, hidden]."""
        gated = torch.empty_like(vectors, memory_format=torch.contiguous_format)
        self.gelu(torch.cat((self.gate(x), vectors), 1), "tanh", gated)
        return self.norm(self.projection(gated))
