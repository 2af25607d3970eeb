"""Llama (Touvron et al., 2023; Llama 2 and 3): a pre-norm decoder with rotary embeddings, grouped-query attention, SwiGLU."""

from __future__ import annotations

from torch import Tensor

from gristmill.runtime.batch import Batch
from gristmill.runtime.cache import PagedCache
from gristmill.runtime.layers.attention import Attention
from gristmill.runtime.layers.embedding import Embedding, LogitsHead
from gristmill.runtime.layers.mlp import MLP
from gristmill.runtime.layers.norm import RMSNorm
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.layers.rope import Rope
from gristmill.runtime.loader.config import ModelConfig
from gristmill.runtime.loader.weights import Weight, Weights, WeightTable


def table(c: ModelConfig) -> WeightTable:
    """Checkpoint tensors -> parameters. q, k and v are one matrix, gate and up another."""
    hidden, ffn = c.hidden_size, c.intermediate_size
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    found = [
        Weight("embedding", ("model.embed_tokens.weight",), (c.vocab_size,), hidden),
        Weight("norm", ("model.norm.weight",), (hidden,)),
    ]
    if not c.tie_embeddings:
        found.append(Weight("head", ("lm_head.weight",), (c.vocab_size,), hidden))
    for i in range(c.num_layers):
        name, source = f"layers.{i}", f"model.layers.{i}"
        qkv = tuple(f"{source}.self_attn.{part}_proj" for part in "qkv")
        gate_up = (f"{source}.mlp.gate_proj", f"{source}.mlp.up_proj")
        out, down = f"{source}.self_attn.o_proj", f"{source}.mlp.down_proj"
        found += [
            Weight(f"{name}.attention_norm", (f"{source}.input_layernorm.weight",), (hidden,)),
            Weight(f"{name}.qkv", qkv, (q, kv, kv), hidden, "linear"),
            Weight(f"{name}.out", (out,), (hidden,), q, "linear"),
            Weight(f"{name}.mlp_norm", (f"{source}.post_attention_layernorm.weight",), (hidden,)),
            Weight(f"{name}.gate_up", gate_up, (ffn, ffn), hidden, "linear"),
            Weight(f"{name}.down", (down,), (hidden,), ffn, "linear"),
        ]
        if c.attention_bias:
            found.append(Weight(f"{name}.qkv.bias", tuple(f"{part}.bias" for part in qkv), (q, kv, kv)))
            found.append(Weight(f"{name}.out.bias", (f"{out}.bias",), (hidden,)))
        if c.mlp_bias:
            found.append(Weight(f"{name}.gate_up.bias", tuple(f"{part}.bias" for part in gate_up), (ffn, ffn)))
            found.append(Weight(f"{name}.down.bias", (f"{down}.bias",), (hidden,)))
    ignored = ("model.layers.*.self_attn.rotary_emb.inv_freq", *(("lm_head.weight",) if c.tie_embeddings else ()))
    return WeightTable(tuple(found), ignored)


class Layer:
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, c: ModelConfig, weights: Weights, plans: Plans, name: str, rope: Rope) -> None:
        self.attention_norm = RMSNorm(plans, weights.tensor(f"{name}.attention_norm"), c.rms_eps)
        self.attention = Attention(c, plans, weights, name, rope)
        self.mlp_norm = RMSNorm(plans, weights.tensor(f"{name}.mlp_norm"), c.rms_eps)
        self.mlp = MLP(plans, weights, name)

    def __call__(self, x: Tensor, residual: Tensor, batch: Batch, cache: tuple[Tensor, ...]) -> Tensor:
        """x: what is to be added to the residual [tokens, hidden] first; returns what the next layer adds."""
        x = self.attention_norm.add(x, residual)
        x = self.attention(x, batch, cache)
        x = self.mlp_norm.add(x, residual)
        return self.mlp(x)


class Llama:
    """LlamaForCausalLM."""

    def __init__(self, config: ModelConfig, weights: Weights, plans: Plans) -> None:
        self.config = config
        self.plans = plans
        rope = Rope(plans, config)
        self.embedding = Embedding(plans, weights.tensor("embedding"))
        self.layers = [Layer(config, weights, plans, f"layers.{i}", rope) for i in range(config.num_layers)]
        self.norm = RMSNorm(plans, weights.tensor("norm"), config.rms_eps)
        self.head = LogitsHead(plans, self.embedding.weight if config.tie_embeddings else weights.tensor("head"))

    def forward(self, batch: Batch, cache: PagedCache) -> Tensor:
        """Hidden states [tokens, hidden] after the last norm."""
        x = self.embedding(batch.tokens)
        residual = x.new_zeros(x.shape)
        for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
            x = layer(x, residual, batch, layer_cache)
        return self.norm.add(x, residual)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab]."""
        return self.head(hidden)
