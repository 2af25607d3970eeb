"""Layers of encoders: attention over whole sequences, in both directions, without a cache; the feed-forward block without a gate."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gristmill.quant.checkpoints.weights import Weights
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.layers.codes import Codes
from gristmill.runtime.layers.linear import PartialSum, load_linear
from gristmill.runtime.layers.mlp import MLP
from gristmill.runtime.layers.norm import LayerNorm, NoNorm, load_norm
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.layers.pool import pool
from gristmill.runtime.layers.position_bias import BiasedAttention
from gristmill.runtime.layers.rope import Rope
from gristmill.runtime.layers.whole_attention import WholeAttention
from gristmill.runtime.sequences import Sequences


class SelfAttention:
    """Fused q/k/v projection, rotary embedding if the model has one, attention within sequences, output projection.

    Args:
        name: of the layer in the model's table.
        rope: None = positions are in the embeddings.
        window: keys on each side of its own that a token sees; 0 = all.
        bias: as of `BiasedAttention`, which is then in the place of `WholeAttention`: torch computes it. None = there is none.
    """

    def __init__(
        self,
        c: ModelConfig,
        plans: Plans,
        weights: Weights,
        name: str,
        rope: Rope | None = None,
        window: int = 0,
        bias: Tensor | None = None,
    ) -> None:
        self.heads, self.head_dim = c.num_heads, c.head_dim
        self.qkv = load_linear(plans, weights, f"{name}.qkv")
        self.attend: WholeAttention | BiasedAttention
        if bias is None:
            self.attend = WholeAttention(c, plans, rope, window or -1, window or -1)
        else:
            self.attend = BiasedAttention(c, bias)
        self.out = load_linear(plans, weights, f"{name}.out")

    def __call__(self, x: Tensor | Codes, batch: Sequences) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        qkv = self.qkv(x)
        attended = self.attend(qkv.view(len(qkv), 3 * self.heads, self.head_dim), batch)
        return self.out(attended.view(len(qkv), -1))


class FeedForward:
    """down(f(up(x))), with `c.activation` as f."""

    def __init__(self, c: ModelConfig, plans: Plans, weights: Weights, name: str) -> None:
        self.up = load_linear(plans, weights, f"{name}.up")
        self.down = load_linear(plans, weights, f"{name}.down")
        self.function = c.activation
        self.activation = plans.bind("activation", n=self.up.columns, x=plans.x, function=c.activation)

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        inner = self.up(x)
        self.activation(inner, self.function, inner)
        return self.down(inner)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.nn.functional.relu,
    "silu": torch.nn.functional.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}
"""Functions of heads, over one row for each sequence, by their names in `ModelConfig.activation`."""


class PostNormLayer:
    """Attention and feed-forward block, each added to its input and normalized (Vaswani et al., 2017; BERT). `bias` is as of `SelfAttention`."""

    def __init__(
        self, c: ModelConfig, weights: Weights, plans: Plans, index: int, bias: Tensor | None = None
    ) -> None:
        name = f"layers.{index}"
        self.attention = SelfAttention(c, plans, weights, name, bias=bias)
        self.attention_norm = load_norm(plans, weights, f"{name}.attention_norm", c)
        self.mlp = FeedForward(c, plans, weights, name)
        self.mlp_norm = load_norm(plans, weights, f"{name}.mlp_norm", c)

    def __call__(self, x: Tensor, batch: Sequences) -> Tensor:
        """x [tokens, hidden], which is written over -> [tokens, hidden]."""
        x = self.attention_norm.add(self.attention(x, batch), x)
        return self.mlp_norm.add(self.mlp(x), x)


class PreNormLayer:
    """Attention and gated feed-forward block, each after a norm, and added to the residual stream; the attention of the first layer has no norm,
    as the embedding has one (ModernBERT)."""

    def __init__(self, c: ModelConfig, weights: Weights, plans: Plans, index: int, rope: Rope) -> None:
        name = f"layers.{index}"
        self.attention_norm = load_norm(plans, weights, f"{name}.attention_norm", c) if index else NoNorm()
        self.attention = SelfAttention(c, plans, weights, name, rope, c.window(index))
        self.mlp_norm = load_norm(plans, weights, f"{name}.mlp_norm", c)
        self.mlp = MLP(plans, weights, name, activation=c.activation)

    def __call__(self, x: Tensor | PartialSum, residual: Tensor, batch: Sequences) -> Tensor | PartialSum:
        """Add x to the residual [tokens, hidden], and return the x of the next layer."""
        attended = self.attention(self.attention_norm.add_for(x, residual), batch)
        return self.mlp(self.mlp_norm.add_for(attended, residual))


class LearnedEmbedding:
    """Embeddings of tokens, of their positions from `c.extra["first_position"]` on, and of token types, added and normalized."""

    def __init__(self, c: ModelConfig, plans: Plans, weights: Weights) -> None:
        self.words = weights.tensor("embedding")
        self.positions = weights.tensor("positions")
        types = weights.optional("types")
        plans.own(self.words, self.positions, types)
        self.types = types
        self.first = c.extra["first_position"]
        self.norm: LayerNorm = LayerNorm(
            plans, weights.tensor("norm"), c.rms_eps, weights.tensor("norm.bias")
        )

    def __call__(self, batch: Sequences) -> Tensor:
        """[tokens, hidden] of a batch."""
        x = self.words[batch.tokens]
        x += self.positions[batch.positions + self.first if self.first else batch.positions]
        if self.types is not None:
            plain = batch.types is None or len(self.types) == 1
            x += self.types[0] if plain else self.types[batch.types]
        return self.norm(x)


class ClassifierHead:
    """The logits of a cross-encoder: classifier(norm(f(dense(x)))) of the first token, or of the mean of all; the norm if the table has one."""

    def __init__(
        self, c: ModelConfig, plans: Plans, weights: Weights, activation: str, pooling: str = "cls"
    ) -> None:
        self.pooling, self.dtype = pooling, plans.dtype
        self.dense = load_linear(plans, weights, "head")
        self.activation = ACTIVATIONS[activation]
        self.norm = load_norm(plans, weights, "head.norm", c) if weights.has("head.norm") else None
        self.classifier = load_linear(plans, weights, "classifier")

    def __call__(self, hidden: Tensor, batch: Sequences) -> Tensor:
        """hidden [tokens, hidden] -> [sequences, labels]."""
        x = self.activation(self.dense(pool(hidden, batch, [self.pooling]).to(self.dtype)))
        return self.classifier(x if self.norm is None else self.norm(x))
