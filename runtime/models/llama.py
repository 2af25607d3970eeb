"""Llama (Touvron et al., 2023; Llama 2 and 3): a pre-norm decoder with rotary embeddings, grouped-query attention, SwiGLU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from torch import Tensor

from gristmill.quant.checkpoints.shards import ShardSpec
from gristmill.quant.checkpoints.table import TIED, Weight, WeightTable
from gristmill.quant.checkpoints.weights import Weights
from gristmill.quant.formats.gguf import GgufArchitecture
from gristmill.runtime.batch import Batch
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.kv_cache.groups import KVGroup, make_groups
from gristmill.runtime.kv_cache.paged import PagedCache
from gristmill.runtime.layers.attention import Attention
from gristmill.runtime.layers.embedding import embedding_and_head
from gristmill.runtime.layers.linear import PartialSum
from gristmill.runtime.layers.mlp import MLP
from gristmill.runtime.layers.moe import MixtureOfExperts
from gristmill.runtime.layers.norm import RMSNorm
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.layers.rope import Rope
from gristmill.runtime.models import Family


def table(c: ModelConfig) -> WeightTable:
    """Checkpoint tensors -> parameters. q, k and v are one matrix, gate and up another."""
    return decoder_table(c, lambda name, source, layer: mlp(c, name, f"{source}.mlp"))


def decoder_table(c: ModelConfig, feed_forward: Callable[[str, str, int], Iterable[Weight]]) -> WeightTable:
    """The table of such a decoder; feed_forward(name, source, layer) yields the weights of the feed-forward block."""
    hidden, weights = c.hidden_size, outside_layers(c)
    for i in range(c.num_layers):
        name, source = f"layers.{i}", f"model.layers.{i}"
        weights += [
            Weight(f"{name}.attention_norm", (f"{source}.input_layernorm.weight",), (hidden,)),
            *attention(c, name, f"{source}.self_attn"),
            Weight(f"{name}.mlp_norm", (f"{source}.post_attention_layernorm.weight",), (hidden,)),
            *feed_forward(name, source, i),
        ]
    ignored = ("model.layers.*.self_attn.rotary_emb.inv_freq",)
    return WeightTable(tuple(weights), ignored, (TIED,) if c.tie_embeddings else ())


def outside_layers(c: ModelConfig) -> list[Weight]:
    """Embedding, last norm, and the logits head where it is not the embedding."""
    hidden, shard = c.hidden_size, vocabulary(c)
    weights = [
        Weight("embedding", ("model.embed_tokens.weight",), (c.vocab_size,), hidden, shard=shard),
        Weight("norm", ("model.norm.weight",), (hidden,)),
    ]
    if not c.tie_embeddings:
        weights.append(Weight("head", ("lm_head.weight",), (c.vocab_size,), hidden, shard=shard))
    return weights


def vocabulary(c: ModelConfig) -> ShardSpec:
    """Rows of the embedding and of the logits head, anywhere."""
    return ShardSpec.rows(c.vocab_size, unit=1)


def attention(c: ModelConfig, name: str, source: str) -> Iterator[Weight]:
    """Projections, with biases and norms of heads if the configuration has them."""
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    qkv = tuple(f"{source}.{part}_proj" for part in "qkv")
    by_heads = ShardSpec.head_rows(
        c.num_heads, c.num_kv_heads, c.num_kv_heads, size=c.head_dim, whole=(1, 2) if c.replicate_kv else ()
    )
    inner = ShardSpec.head_columns(c.num_heads, c.head_dim)
    yield Weight(f"{name}.qkv", qkv, (q, kv, kv), c.hidden_size, "linear", shard=by_heads)
    yield Weight(f"{name}.out", (f"{source}.o_proj",), (c.hidden_size,), q, "linear", shard=inner)
    if c.attention_bias or c.qkv_bias:
        yield Weight(f"{name}.qkv.bias", tuple(f"{part}.bias" for part in qkv), (q, kv, kv), shard=by_heads)
    if c.attention_bias:
        yield Weight(f"{name}.out.bias", (f"{source}.o_proj.bias",), (c.hidden_size,))
    if c.qk_norm:
        yield Weight(f"{name}.q_norm", (f"{source}.q_norm.weight",), (c.head_dim,))
        yield Weight(f"{name}.k_norm", (f"{source}.k_norm.weight",), (c.head_dim,))


def mlp(c: ModelConfig, name: str, source: str, ffn: int = 0) -> Iterator[Weight]:
    """Gate, up and down, with biases if the configuration has them. `ffn` is the inner size; 0 = `c.intermediate_size`."""
    hidden, ffn = c.hidden_size, ffn or c.intermediate_size
    gate_up, down = (f"{source}.gate_proj", f"{source}.up_proj"), f"{source}.down_proj"
    inner = ShardSpec.rows(ffn, ffn)
    yield Weight(f"{name}.gate_up", gate_up, (ffn, ffn), hidden, "linear", shard=inner)
    yield Weight(f"{name}.down", (down,), (hidden,), ffn, "linear", shard=ShardSpec.columns(ffn))
    if c.mlp_bias:
        yield Weight(
            f"{name}.gate_up.bias", tuple(f"{part}.bias" for part in gate_up), (ffn, ffn), shard=inner
        )
        yield Weight(f"{name}.down.bias", (f"{down}.bias",), (hidden,))


class Layer:
    """Attention and feed-forward, each after a norm and added to the residual stream. Families override how the two are made."""

    def __init__(self, c: ModelConfig, weights: Weights, plans: Plans, index: int, rope: Rope) -> None:
        name = f"layers.{index}"
        self.attention_norm = RMSNorm(plans, weights.tensor(f"{name}.attention_norm"), c.rms_eps)
        self.attention = self.make_attention(c, weights, plans, index, rope)
        self.mlp_norm = RMSNorm(plans, weights.tensor(f"{name}.mlp_norm"), c.rms_eps)
        self.mlp = self.make_mlp(c, weights, plans, index)
        # Attention or a feed-forward block of another family may take floats alone, and say nothing.
        self.attention_norm.serve(getattr(self.attention, "takes", None))
        self.mlp_norm.serve(getattr(self.mlp, "takes", None), keep=getattr(self.mlp, "takes_values", False))

    def make_attention(
        self, c: ModelConfig, weights: Weights, plans: Plans, index: int, rope: Rope
    ) -> Callable[[Any, Batch, tuple[Tensor, ...]], Tensor | PartialSum]:
        """The attention of the layer."""
        return Attention(c, plans, weights, f"layers.{index}", rope, reduce=False)

    def make_mlp(
        self, c: ModelConfig, weights: Weights, plans: Plans, index: int
    ) -> Callable[[Any], Tensor | PartialSum]:
        """The feed-forward block: experts in layers that have them."""
        if c.moe is not None and c.is_moe_layer(index):
            return MixtureOfExperts(c.moe, plans, weights, f"layers.{index}", reduce=False)
        return MLP(plans, weights, f"layers.{index}", reduce=False)

    def __call__(
        self, x: Tensor | PartialSum, residual: Tensor, batch: Batch, cache: tuple[Tensor, ...]
    ) -> Tensor | PartialSum:
        """Add x to the residual [tokens, hidden], and return the x of the next layer. Norms complete the sums over ranks."""
        y = self.attention_norm.add_for(x, residual)
        x = self.attention(y, batch, cache)
        y = self.mlp_norm.add_for(x, residual)
        return self.mlp(y)


class Decoder:
    """A stack of decoder layers between an embedding and a logits head. Families set `make_layer`."""

    make_layer: ClassVar[Callable[..., Any]] = Layer

    def __init__(self, config: ModelConfig, weights: Weights, plans: Plans) -> None:
        self.config = config
        self.plans = plans
        rope = Rope(plans, config)
        self.layers = [
            type(self).make_layer(config, weights, plans, i, rope) for i in range(config.num_layers)
        ]
        self.norm = RMSNorm(plans, weights.tensor("norm"), config.rms_eps)
        self.embedding, self.head = embedding_and_head(plans, weights, config.tie_embeddings)

    @property
    def in_pieces(self) -> bool:
        """Whether steps can be captured in pieces: the lengths of sequences are used in `Batch.apart` alone."""
        return all(type(getattr(layer, "attention", None)) is Attention for layer in self.layers)

    def forward(
        self, batch: Batch, cache: PagedCache, taps: dict[int, Tensor | None] | None = None
    ) -> Tensor:
        """Hidden states [tokens, hidden] after the last norm. `taps` maps layers to their outputs with the residual, written for the layers in it."""
        embedded = self.embedding(batch.tokens)
        residual = embedded.new_zeros(embedded.shape)
        x: Tensor | PartialSum = embedded
        parts = zip(self.layers, cache.layers, cache.batches(batch), strict=True)
        for index, (layer, layer_cache, part) in enumerate(parts):
            x = layer(x, residual, part, layer_cache)
            if taps is not None and index in taps:
                taps[index] = residual + (x.x if isinstance(x, PartialSum) else x)
        return self.norm.add(x, residual)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[rows, hidden] -> [rows, vocab]; in `out`, contiguous, if it is given."""
        return self.head(hidden, out)


class Llama(Decoder):
    """LlamaForCausalLM, and related models with another table or another `make_layer`."""

    taps = True

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Layers that share block tables, by their windows."""
        return make_groups(self.config.windows or (0,) * self.config.num_layers)


GGUF_ATTENTION = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
}
"""Modules of a layer, without its feed-forward block, and ggml's names of them."""
GGUF_MLP = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}

FAMILY = Family(
    name="Llama",
    architectures={"LlamaForCausalLM": "llama"},
    table=table,
    model=Llama,
    gguf=(GgufArchitecture("llama", "LlamaForCausalLM", GGUF_ATTENTION | GGUF_MLP, paired=True),),
)
