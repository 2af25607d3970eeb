"""Llama (Touvron et al., 2023; Llama 2 and 3): a pre-norm decoder with rotary embeddings, grouped-query attention, SwiGLU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

from torch import Tensor

from gristmill.quant.checkpoints.shards import ShardSpec
from gristmill.quant.checkpoints.table import TIED, Kind, Weight, WeightTable
from gristmill.quant.checkpoints.weights import Weights
from gristmill.quant.formats.gguf import GgufArchitecture
from gristmill.runtime.batch import Batch
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.errors import ConfigError
from gristmill.runtime.kv_cache.groups import KVGroup, make_groups
from gristmill.runtime.kv_cache.paged import PagedCache
from gristmill.runtime.layers.attention import Attention
from gristmill.runtime.layers.embedding import embedding_alone, embedding_and_head
from gristmill.runtime.layers.linear import PartialSum, load_linear
from gristmill.runtime.layers.mlp import MLP
from gristmill.runtime.layers.moe import MixtureOfExperts
from gristmill.runtime.layers.norm import LayerNorm, NoNorm, RMSNorm, load_norm
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.layers.rope import Rope, Ropes
from gristmill.runtime.layers.whole_attention import DecoderAttention
from gristmill.runtime.models import Family
from gristmill.runtime.sequences import Sequences

PRE_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def decoder_table(
    c: ModelConfig,
    feed_forward: Callable[[str, str, int], Iterable[Weight]] | None = None,
    norm_modules: Mapping[str, str] = PRE_NORMS,
) -> WeightTable:
    """Checkpoint tensors -> parameters. q, k and v are one matrix, gate and up another.

    feed_forward(name, source, layer) yields the weights of the feed-forward block; None = gate, up and down. `norm_modules` are as in `norms`.
    """
    weights = outside_layers(c)
    for i in range(c.num_layers):
        name, source = f"layers.{i}", f"model.layers.{i}"
        weights += [
            *norms(c, name, source, norm_modules),
            *attention(c.of_layer(i), name, f"{source}.self_attn"),
            *(feed_forward(name, source, i) if feed_forward else mlp(c, name, f"{source}.mlp")),
        ]
    ignored = ("model.layers.*.self_attn.rotary_emb.inv_freq", *(("lm_head.*",) if c.whole else ()))
    return WeightTable(tuple(weights), ignored, (TIED,) if c.tie_embeddings and not c.whole else ())


def outside_layers(c: ModelConfig) -> list[Weight]:
    """Embedding, last norm, and the logits head where it is not the embedding; for pooling, a classifier if there is one."""
    hidden, shard = c.hidden_size, vocabulary(c)
    weights = [
        Weight("embedding", ("model.embed_tokens.weight",), (c.vocab_size,), hidden, shard=shard),
        norm(c, "norm", "model.norm"),
    ]
    if c.whole and c.labels:
        weights.append(Weight("classifier", ("score",), (c.labels,), hidden, "linear"))
    if not c.whole and not c.tie_embeddings:
        weights.append(Weight("head", ("lm_head.weight",), (c.vocab_size,), hidden, shard=shard))
    return weights


def vocabulary(c: ModelConfig) -> ShardSpec:
    """Rows of the embedding and of the logits head, anywhere."""
    return ShardSpec.rows(c.vocab_size, unit=1)


def norms(c: ModelConfig, name: str, source: str, modules: Mapping[str, str] = PRE_NORMS) -> Iterator[Weight]:
    """The norms of a layer: `modules` has the checkpoint's names of ``attention_norm`` and ``mlp_norm``, before the two blocks, and of
    ``attention_post_norm`` and ``mlp_post_norm``, on their outputs, as far as it has them."""
    for target, part in modules.items():
        yield norm(c, f"{name}.{target}", f"{source}.{part}")


def norm(c: ModelConfig, target: str, module: str, size: int = 0) -> Weight:
    """The weight of a norm. `size` 0 = the hidden size."""
    kind: Kind = "fp32" if c.wide_norms else "kept"
    return Weight(target, (f"{module}.weight",), (size or c.hidden_size,), None, kind)


def attention(c: ModelConfig, name: str, source: str) -> Iterator[Weight]:
    """Projections, with biases and norms of heads if the configuration has them."""
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    qkv, lengths = tuple(f"{source}.{part}_proj" for part in c.projected), (q, kv, kv)[: len(c.projected)]
    heads = (c.num_heads, c.num_kv_heads, c.num_kv_heads)[: len(c.projected)]
    by_heads = ShardSpec.head_rows(*heads, size=c.head_dim, whole=(1, 2) if c.replicate_kv else ())
    inner = ShardSpec.head_columns(c.num_heads, c.head_dim)
    yield Weight(f"{name}.qkv", qkv, lengths, c.hidden_size, "linear", shard=by_heads)
    if c.attention_gate:
        of_queries = ShardSpec("rows", by_heads.shards[:1])
        yield Weight(
            f"{name}.gate", (f"{source}.gate_proj",), (q,), c.hidden_size, "linear", shard=of_queries
        )
    yield Weight(f"{name}.out", (f"{source}.o_proj",), (c.hidden_size,), q, "linear", shard=inner)
    if c.attention_bias or c.qkv_bias:
        yield Weight(f"{name}.qkv.bias", tuple(f"{part}.bias" for part in qkv), lengths, shard=by_heads)
    if c.attention_bias:
        yield Weight(f"{name}.out.bias", (f"{source}.o_proj.bias",), (c.hidden_size,))
    if c.qk_norm:
        yield norm(c, f"{name}.q_norm", f"{source}.q_norm", c.head_dim)
        if c.projected != "q":
            yield norm(c, f"{name}.k_norm", f"{source}.k_norm", c.head_dim)
    if c.qk_norm_heads:
        alone = ShardSpec.head_rows(c.num_heads, c.num_kv_heads, size=1, whole=(1,) if c.replicate_kv else ())
        for part, count, shard in zip("qk", (c.num_heads, c.num_kv_heads), alone.shards, strict=True):
            of_heads = ShardSpec("rows", (shard,))
            yield Weight(
                f"{name}.{part}_norm", (f"{source}.{part}_norm.weight",), (count,), c.head_dim, shard=of_heads
            )
    if c.qk_norm_whole:
        for part, rows, shard in zip("qk", (q, kv), by_heads.shards, strict=False):
            of_heads = ShardSpec("rows", (shard,))
            yield Weight(f"{name}.{part}_norm", (f"{source}.{part}_norm.weight",), (rows,), shard=of_heads)


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


def sums_itself(c: ModelConfig) -> bool:
    """Whether a block completes its sum over the ranks, because a norm takes its result."""
    return c.norms in ("post", "both")


class Layer:
    """Attention and feed-forward, each after a norm, or with one on its output, and added to the residual stream. Families override how the two
    are made."""

    def __init__(self, c: ModelConfig, weights: Weights, plans: Plans, index: int, rope: Rope) -> None:
        name = f"layers.{index}"
        before, after = c.norms != "post", c.norms in ("post", "both")

        def norm(target: str) -> RMSNorm | LayerNorm:
            return load_norm(plans, weights, f"{name}.{target}", c)

        self.attention_norm = norm("attention_norm") if before else NoNorm()
        self.attention = self.make_attention(c, weights, plans, index, rope)
        self.mlp_norm = norm("mlp_norm") if before else NoNorm()
        self.mlp = self.make_mlp(c, weights, plans, index)
        self.attention_post_norm = norm("attention_post_norm") if after else None
        self.mlp_post_norm = norm("mlp_post_norm") if after else None
        self.residual_scale = c.residual_scale
        # Attention or a feed-forward block of another family may take floats alone, and say nothing.
        self.attention_norm.serve(getattr(self.attention, "takes", None))
        self.mlp_norm.serve(getattr(self.mlp, "takes", None), keep=getattr(self.mlp, "takes_values", False))

    def make_attention(
        self, c: ModelConfig, weights: Weights, plans: Plans, index: int, rope: Rope
    ) -> Callable[[Any, Any, tuple[Tensor, ...]], Tensor | PartialSum]:
        """The attention of the layer, in its window or its chunks if it has them; of whole sequences, or over a cache."""
        c = c.of_layer(index)
        if c.whole:
            return DecoderAttention(c, plans, weights, f"layers.{index}", rope, c.window(index))
        window, chunk, reduce = c.window(index), c.chunk(index), sums_itself(c)
        return Attention(c, plans, weights, f"layers.{index}", rope, window, chunk=chunk, reduce=reduce)

    def make_mlp(
        self, c: ModelConfig, weights: Weights, plans: Plans, index: int
    ) -> Callable[[Any], Tensor | PartialSum]:
        """The feed-forward block: experts in layers that have them."""
        if c.moe is not None and c.is_moe_layer(index):
            return MixtureOfExperts(c.moe, plans, weights, f"layers.{index}", reduce=sums_itself(c))
        return MLP(plans, weights, f"layers.{index}", reduce=sums_itself(c), activation=c.activation)

    def __call__(
        self, x: Tensor | PartialSum, residual: Tensor, batch: Batch | Sequences, cache: tuple[Tensor, ...]
    ) -> Tensor | PartialSum:
        """Add x to the residual [tokens, hidden], and return the x of the next layer. Norms complete the sums over ranks."""
        y = self.attention_norm.add_for(x, residual)
        x = self._output(self.attention(y, batch, cache), self.attention_post_norm)
        y = self.mlp_norm.add_for(x, residual)
        return self._output(self.mlp(y), self.mlp_post_norm)

    def _output(self, x: Tensor | PartialSum, norm: RMSNorm | LayerNorm | None) -> Tensor | PartialSum:
        """What a block adds to the residual: its result, normalized or scaled if the family does so."""
        if norm is not None:
            if isinstance(x, PartialSum):
                raise ValueError("a partial sum over ranks, which a norm on a block's output takes complete")
            x = norm(x)
        if self.residual_scale != 1:
            (x.x if isinstance(x, PartialSum) else x).mul_(self.residual_scale)
        return x


class ParallelLayer(Layer):
    """Attention and feed-forward after the same norm, both added to the residual stream (Wang and Komatsuzaki, 2021: GPT-J)."""

    def __init__(self, c: ModelConfig, weights: Weights, plans: Plans, index: int, rope: Rope) -> None:
        self.norm = load_norm(plans, weights, f"layers.{index}.attention_norm", c)
        self.attention = self.make_attention(c, weights, plans, index, rope)
        self.mlp = self.make_mlp(c, weights, plans, index)

    def __call__(
        self, x: Tensor | PartialSum, residual: Tensor, batch: Batch | Sequences, cache: tuple[Tensor, ...]
    ) -> Tensor | PartialSum:
        """As of `Layer`."""
        y = self.norm.add(x, residual)
        attended, fed = self.attention(y, batch, cache), self.mlp(y)
        if isinstance(attended, PartialSum) and isinstance(fed, PartialSum):
            return PartialSum(attended.x.add_(fed.x))
        if isinstance(attended, PartialSum) or isinstance(fed, PartialSum):
            raise ValueError("one of two results that are added is a partial sum over ranks")
        return attended.add_(fed)


class Decoder:
    """A stack of decoder layers between an embedding and a logits head. Families set `make_layer`."""

    make_layer: ClassVar[Callable[..., Any]] = Layer
    leaves_out = True

    def __init__(self, config: ModelConfig, weights: Weights, plans: Plans) -> None:
        self.config = config
        self.plans = plans
        ropes = Ropes(plans, config)
        self.layers = [
            type(self).make_layer(config, weights, plans, i, ropes[i]) for i in range(config.num_layers)
        ]
        for index, layer in enumerate(self.layers):
            if (source := config.kv_source(index)) != index:
                layer.attention.scales = self.layers[source].attention.scales
        self.norm = load_norm(plans, weights, "norm", config)
        self.classifier = None
        if config.whole:
            self.embedding = embedding_alone(plans, weights, config)
            self.classifier = load_linear(plans, weights, "classifier") if config.labels else None
        else:
            self.embedding, self.head = embedding_and_head(plans, weights, config)

    @property
    def in_pieces(self) -> bool:
        """Whether steps can be captured in pieces: the lengths of sequences are used in `Batch.apart` alone."""
        return all(type(getattr(layer, "attention", None)) is Attention for layer in self.layers)

    def forward(
        self, batch: Batch, cache: PagedCache, taps: dict[int, Tensor | None] | None = None
    ) -> Tensor:
        """Hidden states [tokens, hidden] after the last norm. `taps` maps layers to their outputs with the residual, written for the layers in it,
        which run even if the batch leaves them out."""
        embedded = self.embedding(batch.tokens)
        residual = embedded.new_zeros(embedded.shape)
        x: Tensor | PartialSum = embedded
        given = self.layer_inputs(batch.tokens, embedded)
        parts = zip(self.layers, cache.layers, cache.batches(batch), given, strict=True)
        for index, (layer, layer_cache, part, more) in enumerate(parts):
            if index in batch.left_out and (taps is None or index not in taps):
                continue
            x = layer(x, residual, part, layer_cache, *more)
            if taps is not None and index in taps:
                taps[index] = residual + (x.x if isinstance(x, PartialSum) else x)
        return self.norm.add(x, residual)

    def layer_inputs(self, tokens: Tensor, embedded: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """What each layer takes beside the residual stream, of tokens [tokens] and their embeddings [tokens, hidden]: nothing."""
        return [()] * len(self.layers)

    def encode(self, batch: Sequences) -> Tensor:
        """Hidden states [tokens, hidden] of whole sequences after the last norm, of a model that was made for them (`ModelConfig.whole`)."""
        embedded = self.embedding(batch.tokens)
        x, residual = embedded, embedded.new_zeros(embedded.shape)
        for layer in self.layers:
            x = layer(x, residual, batch, ())
        return self.norm.add(x, residual)

    def classify(self, hidden: Tensor, batch: Sequences) -> Tensor:
        """Logits [sequences, labels] of the last tokens."""
        if self.classifier is None:
            raise ConfigError(f"{self.config.architecture} has no classifier")
        return self.classifier(hidden[batch.last])

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[rows, hidden] -> [rows, vocab]; in `out`, contiguous, if it is given."""
        return self.head(hidden, out)


class Llama(Decoder):
    """LlamaForCausalLM, and related models with another table or another `make_layer`."""

    taps = True

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Layers that share block tables, by their windows and the widths of their keys."""
        c, layers = self.config, range(self.config.num_layers)
        widths, sources = map(c.kv_width, layers), map(c.kv_source, layers)
        return make_groups(c.windows or (0,) * c.num_layers, [*widths], [*sources])


GGUF_ATTENTION = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
}
"""Modules of a layer, without its feed-forward block, and ggml's names of them."""
GGUF_HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
GGUF_BOTH_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""Names of norms on the outputs of blocks, and of those before them where there are both."""
GGUF_MLP = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}

FAMILY = Family(
    name="Llama",
    architectures={"LlamaForCausalLM": "llama"},
    table=decoder_table,
    model=Llama,
    gguf=(GgufArchitecture("llama", "LlamaForCausalLM", GGUF_ATTENTION | GGUF_MLP, paired=True),),
)
