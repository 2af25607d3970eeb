"""ModelConfig: the configuration of a model as frozen data, and typed access to the entries of config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gristmill.kernels.rope.cache import RopeParameters
from gristmill.quant.formats import contract
from gristmill.runtime.errors import ConfigError
from gristmill.runtime.layer_attention import LayerAttention


@dataclass(frozen=True)
class MlaConfig:
    """Multi-head latent attention (DeepSeek-V2): ranks of the projections and sizes of a head's parts."""

    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int

    @property
    def qk_dim(self) -> int:
        """Size of a query head: the part without position and the rotated part."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """Elements per token in the cache: the latent and the rotated key, 576 in DeepSeek-V3."""
        return self.kv_lora_rank + self.rope_dim


@dataclass(frozen=True)
class MoeConfig:
    """Mixture of experts: routed experts in groups, shared experts, and the weights of routed experts.

    Attributes:
        scoring: ``sigmoid`` or ``softmax`` of the router's logits.
        choice_bias: whether the checkpoint has a bias that is added to the scores for choosing only.
        first_dense, dense_layers: layers before first_dense, and those in dense_layers, have no experts.
        shared_gate: whether the shared experts have a weight of their own in each token, the sigmoid of a product.
        activation: of the gate, ``silu`` or another function of `moe`.
        weigh_input: whether the weight of an expert multiplies its input instead of its output.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    num_shared: int
    num_groups: int
    top_groups: int
    norm_topk_prob: bool
    scale: float
    first_dense: int = 0
    scoring: str = "sigmoid"
    choice_bias: bool = True
    dense_layers: tuple[int, ...] = ()
    weigh_input: bool = False
    shared_gate: bool = False
    activation: str = "silu"

    @staticmethod
    def most_probable(
        fields: Fields,
        num_experts: int,
        intermediate_size: int,
        norm_topk_prob: bool = True,
        dense_layers: tuple[int, ...] = (),
    ) -> MoeConfig:
        """Experts chosen by the largest probabilities, ``num_experts_per_tok`` of them, without groups or shared experts."""
        top_k = fields.size("num_experts_per_tok")
        if top_k > num_experts:
            raise ConfigError(
                f"{fields.origin}: num_experts_per_tok = {top_k} is more than the {num_experts} experts"
            )
        return MoeConfig(
            num_experts=num_experts,
            top_k=top_k,
            intermediate_size=intermediate_size,
            num_shared=0,
            num_groups=1,
            top_groups=1,
            norm_topk_prob=norm_topk_prob,
            scale=1.0,
            scoring="softmax",
            choice_bias=False,
            dense_layers=dense_layers,
        )


@dataclass(frozen=True)
class QueryScale:
    """A factor of queries that grows with their position: 1 + growth · ln(1 + ⌊(position + shift) / span⌋), against scores that flatten in long
    contexts (Nakanishi, 2025, arXiv:2501.19399).

    Attributes:
        unrotated: whether it is for layers without position alone.
    """

    growth: float
    span: float
    shift: int = 0
    unrotated: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """One model. Sizes are in elements.

    `eos_ids` come from generation_config.json, else config.json; nothing else of generation_config.json is used: what
    it recommends for sampling (temperature, top_k, top_p) does not change the defaults of `SamplingParams`.

    Attributes:
        max_position: positions that a token can have, of the model or as `for_length` bounds them.
        rope_dim: elements of a head that are rotated, from the first on.
        layer_attention: for each layer, its heads and its part in the KV cache; empty = all are alike. `of_layer` has them in place of the
            model's num_kv_heads, head_dim, rope_dim and projected.
        projected: what attention projects: ``qkv``; ``qk``, where keys are values too; ``q``, where those of another layer are read.
        attention_bias: whether q, k, v and the output have biases; qkv_bias: only q, k and v.
        qk_norm: whether heads of q and k are normalized, each head by itself; qk_norm_whole: all heads of a token together.
        qk_norm_heads: whether each head has LayerNorm with weights of its own (Command R+).
        qk_norm_plain: whether they are normalized without weights, in layers that rotate them.
        v_norm: whether heads of v are normalized, without weights.
        attention_gate: whether the sigmoid of a product of the layer's input multiplies the elements of attention's result.
        query_scale: the factor of queries by their position; None = 1.
        norms: where a layer's norms are: ``pre`` = before attention and feed-forward block, ``post`` = on their outputs, ``both``.
        norm: ``rms`` (RMSNorm) or ``layer`` (LayerNorm without bias); rms_eps is the epsilon of either.
        wide_norms: whether weights of norms are float32 in any model, because they are more than its dtype holds. norm_offset: added to them, 1
            where checkpoints store what differs from 1 (Gemma).
        activation: of the gate of a dense feed-forward block, ``silu`` or ``gelu_tanh``; of an encoder's, also ``gelu`` (exact) or ``relu``.
        layer_ropes: for each layer, the frequencies of its rotary embedding, None = it has none; empty = all layers have `rope`.
        softmax_scale: the factor of scores; None = head_dim^-0.5.
        embedding_scale, residual_scale, logit_scale: factors of embeddings, of what each block adds to the residual, and of logits.
        long_rope, long_position: other frequencies for sequences longer than max_position, up to long_position: `for_length` chooses. None and
            0 = there are none.
        score_cap, logit_cap: scores, or logits, x become cap · tanh(x / cap); 0 = as they are.
        bidirectional: whether tokens attend to those after them, too: such a model generates nothing.
        windows: for each layer, the number of keys that a query sees, 0 = all; empty if no layer has a window. Of encoders and bidirectional
            decoders, the keys on each side.
        task: what the architecture is for: ``generate``, ``embed`` (it has no head), or ``score`` (a classifier).
        chunks: for each layer, the tokens of a chunk, within which its queries see keys, 0 = all; empty if no layer has chunks.
        whole: whether sequences are computed whole, without a KV cache and without a logits head: for pooling.
        labels: classes of a classifier over the sequence; 0 = it has none.
        replicate_kv: whether every rank has all KV heads, because ranks share contexts by tokens.
        extra: entries that only the family's own layers read, by name.
        quantization: the checkpoint's quantization_config, for `gristmill.quant.formats`; None = not quantized.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_eps: float
    max_position: int
    rope: RopeParameters
    rope_dim: int
    rope_interleaved: bool
    tie_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str
    eos_ids: tuple[int, ...]
    mla: MlaConfig | None = None
    moe: MoeConfig | None = None
    layer_attention: tuple[LayerAttention, ...] = ()
    projected: str = "qkv"
    qkv_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    qk_norm_heads: bool = False
    qk_norm_plain: bool = False
    v_norm: bool = False
    attention_gate: bool = False
    query_scale: QueryScale | None = None
    norms: str = "pre"
    norm: str = "rms"
    wide_norms: bool = False
    norm_offset: float = 0.0
    activation: str = "silu"
    layer_ropes: tuple[RopeParameters | None, ...] = ()
    softmax_scale: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    long_rope: RopeParameters | None = None
    long_position: int = 0
    score_cap: float = 0.0
    logit_cap: float = 0.0
    bidirectional: bool = False
    windows: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()
    task: str = "generate"
    whole: bool = False
    labels: int = 0
    replicate_kv: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    quantization: Mapping[str, Any] | None = field(default=None, hash=False)

    def for_length(self, wanted: int | None) -> ModelConfig:
        """The configuration for sequences of up to `wanted` tokens, with no more positions than that, for which tables are made; None = as many as
        it has.

        The frequencies of longrope depend on the length of the whole sequence, those of keys in the cache too: transformers computes a sequence
        anew when it outgrows the original length. As vLLM does, all sequences of an engine have one set, here the long one if `wanted` is
        more than the original length: longer ones are computed as transformers computes them, shorter ones with the long set too.
        """
        if wanted is None:
            return self
        made = self
        if self.long_rope is not None and wanted > self.max_position:
            made = replace(
                self, max_position=self.long_position, rope=self.long_rope, long_rope=None, long_position=0
            )
        return replace(made, max_position=min(wanted, made.max_position))

    def of_layer(self, layer: int) -> ModelConfig:
        """The configuration with the attention of a layer; of one after the last, that of the model."""
        if layer >= len(self.layer_attention):
            return self
        own = self.layer_attention[layer]
        return replace(
            self,
            num_kv_heads=own.kv_heads,
            head_dim=own.head_dim,
            rope_dim=own.rope_dim,
            projected=own.projected,
            layer_attention=(),
        )

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values a layer reads: itself, or one before it."""
        source = self.layer_attention[layer].source if layer < len(self.layer_attention) else None
        return layer if source is None else source

    def kv_width(self, layer: int) -> int:
        """Elements of the keys of a token in a layer's cache, and of its values; of a latent (MLA), of what is there in their place."""
        if self.mla is not None:
            return self.mla.latent_dim
        own = self.of_layer(layer)
        return own.num_kv_heads * own.head_dim

    def window(self, layer: int) -> int:
        """The number of keys that a query of a layer sees, 0 = all. A layer after the last, for prediction, has no window."""
        return self.windows[layer] if layer < len(self.windows) else 0

    def chunk(self, layer: int) -> int:
        """The tokens of a chunk of a layer, 0 = it has none."""
        return self.chunks[layer] if layer < len(self.chunks) else 0

    def rope_of(self, layer: int) -> RopeParameters | None:
        """The frequencies of a layer; of one after the last, those of the model."""
        return self.layer_ropes[layer] if layer < len(self.layer_ropes) else self.rope

    def is_moe_layer(self, layer: int) -> bool:
        """Whether a layer's MLP is a mixture of experts."""
        moe = self.moe
        return moe is not None and layer >= moe.first_dense and layer not in moe.dense_layers


LARGEST = 2**31 - 1
"""The largest integer of an entry."""
COUNTS = {
    "num_hidden_layers": 1 << 12,
    "num_nextn_predict_layers": 1 << 12,
    "sliding_window_pattern": 1 << 12,
    "global_attn_every_n_layers": 1 << 12,
    "num_experts": 1 << 14,
    "num_local_experts": 1 << 14,
    "n_routed_experts": 1 << 14,
}
"""Entries that count parts which are declared one by one, before any of them is looked for in the checkpoint -> their limits."""


class Fields(contract.Fields):
    """Typed access to the entries of config.json. Errors (ConfigError) name the file, the entry, the expected value and the given one.

    Args:
        names: entries that have another name in this file -> that name.
    """

    error = ConfigError

    def __init__(self, data: Any, origin: str, names: Mapping[str, str] | None = None) -> None:
        super().__init__(data, origin)
        self.names = names or {}

    def get(
        self, name: str, kind: type | tuple[type, ...], default: Any = ..., least: float | None = None
    ) -> Any:
        """As of the base class; an entry of `names` is looked for under the name that it has there. Integers have a limit, `COUNTS` or `LARGEST`,
        and no number is infinite or NaN, which JSON of Python may hold."""
        value = super().get(self.names.get(name, name), kind, default, least)
        if kind is int and value is not None and value is not default and value > COUNTS.get(name, LARGEST):
            raise self.error(
                f"{self.origin}: entry {name!r} must be at most {COUNTS.get(name, LARGEST)}, got {value!r}"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise self.error(f"{self.origin}: entry {name!r} must be a finite number, got {value!r}")
        return value

    def size(self, name: str, default: Any = ...) -> Any:
        """A positive integer."""
        return self.get(name, int, default, least=1)

    def number(self, name: str, default: Any = ...) -> Any:
        """A number, as float."""
        value = self.get(name, (int, float), default)
        return value if value is None else float(value)

    def positive(self, name: str, default: Any = ...) -> float:
        """A number over 0, as float."""
        value = float(self.number(name, default))
        if value <= 0:
            raise self.error(f"{self.origin}: entry {name!r} must be positive, got {value!r}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.get(name, bool, default)
        return bool(value)


def gguf_fields(values: Mapping[str, Any]) -> Fields:
    """The keys of a GGUF file, as a family gets them, for those that are calculated with."""
    return Fields(values, str(values["file"].path))


SLIDING, FULL, CHUNKED = "sliding_attention", "full_attention", "chunked_attention"
"""The kinds of layers in ``layer_types``."""


def layer_kinds(
    fields: Fields, usual: Sequence[str], known: Sequence[str] = (SLIDING, FULL)
) -> tuple[str, ...]:
    """The kind of each layer by ``layer_types``, one of the `known`. `usual` is repeated where the entry is missing.

    Raises:
        ConfigError: layer_types names another kind of layer, or fewer layers than there are.
    """
    layers = fields.size("num_hidden_layers")
    kinds = fields.get("layer_types", list, None) or [usual[i % len(usual)] for i in range(layers)]
    if len(kinds) < layers or any(kind not in known for kind in kinds):
        raise ConfigError(
            f"{fields.origin}: layer_types must give each of {layers} layers one of {', '.join(known)}, got {kinds!r}"
        )
    return tuple(kinds[:layers])


def layer_windows(fields: Fields, window: int | None, usual: Sequence[str]) -> tuple[int, ...]:
    """The window of each layer by `layer_kinds`, 0 for full attention."""
    return tuple((window or 0) if kind == SLIDING else 0 for kind in layer_kinds(fields, usual))


ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""``hidden_act`` of config.json -> the function of a feed-forward block."""


def activation(fields: Fields, entry: str = "hidden_act") -> str:
    """The function of feed-forward blocks."""
    given = fields.get(entry, str, "gelu")
    if given not in ACTIVATIONS:
        raise ConfigError(f"{fields.origin}: {entry} must be one of {', '.join(ACTIVATIONS)}, got {given!r}")
    return ACTIVATIONS[given]


def labels(fields: Fields, architecture: str) -> int:
    """The number of classes of an architecture with a classifier: of ``id2label``, or ``num_labels``, 2 where neither is given; 0 of others."""
    if not architecture.endswith("ForSequenceClassification"):
        return 0
    named = fields.get("id2label", dict, None)
    count: int = len(named) if named else fields.size("num_labels", 2)
    return count
