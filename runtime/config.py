"""ModelConfig: the configuration of a model as frozen data, and typed access to the entries of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gristmill.kernels.rope.cache import RopeParameters
from gristmill.quant.formats import contract
from gristmill.runtime.errors import ConfigError


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
class ModelConfig:
    """One model. Sizes are in elements.

    `eos_ids` come from generation_config.json, else config.json; nothing else of generation_config.json is used: what
    it recommends for sampling (temperature, top_k, top_p) does not change the defaults of `SamplingParams`.

    Attributes:
        attention_bias: whether q, k, v and the output have biases; qkv_bias: only q, k and v.
        qk_norm: whether heads of q and k are normalized.
        windows: for each layer, the number of keys that a query sees, 0 = all; empty if no layer has a window.
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
    qkv_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()
    replicate_kv: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    quantization: Mapping[str, Any] | None = field(default=None, hash=False)

    def is_moe_layer(self, layer: int) -> bool:
        """Whether a layer's MLP is a mixture of experts."""
        moe = self.moe
        return moe is not None and layer >= moe.first_dense and layer not in moe.dense_layers


class Fields(contract.Fields):
    """Typed access to the entries of config.json. Errors (ConfigError) name the file, the entry, the expected value and the given one."""

    error = ConfigError

    def size(self, name: str, default: Any = ...) -> Any:
        """A positive integer."""
        return self.get(name, int, default, least=1)

    def number(self, name: str, default: Any = ...) -> Any:
        """A number, as float."""
        value = self.get(name, (int, float), default)
        return value if value is None else float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.get(name, bool, default)
        return bool(value)
