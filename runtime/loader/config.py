"""config.json of a Hugging Face directory as a frozen ModelConfig: everything a model needs to know, checked once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gristmill.kernels.rope.cache import RopeParameters
from gristmill.runtime.errors import ConfigError
from gristmill.runtime.loader.gguf import gguf_config, is_gguf

ARCHITECTURES = (
    "LlamaForCausalLM",
    "DeepseekV3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "MixtralForCausalLM",
    "GptOssForCausalLM",
)
"""What `gristmill.runtime.models` has a file for."""


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
        """Width of a query head: the part without position and the rotated part."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """What the cache holds of a token: the latent and the rotated key, 576 numbers in DeepSeek-V3."""
        return self.kv_lora_rank + self.rope_dim


@dataclass(frozen=True)
class MoeConfig:
    """Mixture of experts: routed experts in groups, shared experts, and how scores become weights.

    scoring: ``sigmoid`` or ``softmax`` of the router's logits. choice_bias: the checkpoint has a bias that is added to
    scores for choosing only. first_dense: layers before it have no experts, nor have dense_layers.
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


@dataclass(frozen=True)
class ModelConfig:
    """One model. Sizes are in elements.

    `eos_ids` come from generation_config.json, else config.json; nothing else of generation_config.json is used: what
    it recommends for sampling (temperature, top_k, top_p) does not change the defaults of `SamplingParams`.

    attention_bias: q, k, v and the output have biases; qkv_bias: q, k and v have. qk_norm: heads of q and k are normalised.
    windows: keys that a query of each layer sees, 0 = all; empty where no layer has a window. sinks: attention has one more
    logit a head. swiglu_limit: where gpt-oss clamps its gating.

    quantization: how the checkpoint's weights are quantized, for `gristmill.quant.formats`; None = not.
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
    bos_id: int | None
    eos_ids: tuple[int, ...]
    mla: MlaConfig | None = None
    moe: MoeConfig | None = None
    num_nextn_layers: int = 0
    qkv_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()
    sinks: bool = False
    swiglu_limit: float = 0.0
    quantization: Mapping[str, Any] | None = field(default=None, hash=False)

    def is_moe_layer(self, layer: int) -> bool:
        """Whether a layer's MLP is a mixture of experts."""
        moe = self.moe
        return moe is not None and layer >= moe.first_dense and layer not in moe.dense_layers


class _Fields:
    """A JSON object read with types: every mistake names the file, the entry, what was expected and what came."""

    def __init__(self, data: Mapping[str, Any], origin: str) -> None:
        self.data = data
        self.origin = origin

    def get(
        self, name: str, kind: type | tuple[type, ...], default: Any = ..., least: float | None = None
    ) -> Any:
        value = self.data.get(name)
        if value is None:
            if default is ...:
                raise ConfigError(f"{self.origin}: entry {name!r} is missing")
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            expected = " or ".join(k.__name__ for k in kinds)
            raise ConfigError(f"{self.origin}: entry {name!r} must be {expected}, got {value!r}")
        if least is not None and isinstance(value, int | float) and value < least:
            raise ConfigError(f"{self.origin}: entry {name!r} must be at least {least}, got {value!r}")
        return value

    def size(self, name: str, default: Any = ...) -> Any:
        """A positive integer."""
        return self.get(name, int, default, least=1)

    def number(self, name: str, default: Any = ...) -> Any:
        """A number, as float."""
        value = self.get(name, (int, float), default)
        return value if value is None else float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, bool, default)
        return bool(value)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ConfigError names the file and what is wrong with it."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(data).__name__}")
    return data


def load_config(directory: str | Path) -> ModelConfig:
    """The configuration of a model directory, or of a GGUF file.

    Raises:
        ConfigError: no such directory, no config.json, an architecture or feature we do not have, an entry that is
            missing or of the wrong kind.
    """
    folder = Path(directory)
    if is_gguf(folder) and not folder.is_dir():
        return parse_config(gguf_config(folder), origin=str(folder))
    if not folder.is_dir():
        raise ConfigError(
            f"no model directory {folder}: expected a folder with config.json and safetensors files"
        )
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no config.json: not a Hugging Face model directory")
    generation = folder / "generation_config.json"
    data = {**read_json(path), "quantization_config": _quantization(folder)}
    return parse_config(data, read_json(generation) if generation.is_file() else {}, str(path))


def parse_config(
    data: Mapping[str, Any], generation: Mapping[str, Any] | None = None, origin: str = "config.json"
) -> ModelConfig:
    """The configuration that the contents of config.json and generation_config.json say."""
    fields = _Fields(data, origin)
    architectures = fields.get("architectures", list)
    known = ", ".join(ARCHITECTURES)
    found = next((a for a in architectures if a in ARCHITECTURES), None)
    if found is None:
        raise ConfigError(
            f"{origin}: architecture {', '.join(map(str, architectures)) or '(none)'} is not supported; known: {known}"
        )
    activation = fields.get("hidden_act", str, "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"{origin}: hidden_act must be silu, got {activation!r}")
    heads = fields.size("num_attention_heads")
    hidden = fields.size("hidden_size")
    kv_heads = fields.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{origin}: num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})"
        )
    _no_window(fields, found)
    deepseek, gpt_oss = found == "DeepseekV3ForCausalLM", found == "GptOssForCausalLM"
    mla = _mla(fields) if deepseek else None
    head_dim = mla.qk_dim if mla else fields.size("head_dim", None) or hidden // heads
    return ModelConfig(
        architecture=found,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden,
        num_layers=fields.size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads if deepseek else kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.size("intermediate_size"),
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        max_position=fields.size("max_position_embeddings"),
        rope=_rope(fields),
        rope_dim=mla.rope_dim if mla else head_dim,
        rope_interleaved=deepseek and fields.flag("rope_interleave", True),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=fields.flag("attention_bias", gpt_oss),
        mlp_bias=fields.flag("mlp_bias", False),
        dtype=_dtype(fields),
        bos_id=fields.get("bos_token_id", int, None),
        eos_ids=_eos(generation or {}, data, origin),
        mla=mla,
        moe=_moe(fields) if deepseek else _plain_moe(fields, found),
        num_nextn_layers=fields.get("num_nextn_predict_layers", int, 0),
        qkv_bias=found == "Qwen2ForCausalLM",
        qk_norm=found in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        windows=_windows(fields) if gpt_oss else (),
        sinks=gpt_oss,
        swiglu_limit=fields.number("swiglu_limit", 7.0) if gpt_oss else 0.0,
        quantization=_checked_quantization(fields),
    )


def _no_window(fields: _Fields, architecture: str) -> None:
    """gpt-oss alone has windowed attention; a window as long as the model's positions cuts nothing off."""
    window, positions = fields.size("sliding_window", None), fields.size("max_position_embeddings")
    if architecture == "GptOssForCausalLM" or (
        architecture.startswith("Qwen") and not fields.flag("use_sliding_window", False)
    ):
        return
    if window is not None and window < positions:
        raise ConfigError(
            f"{fields.origin}: {architecture} has no sliding window, got sliding_window = {window} with {positions} positions; "
            "remove the entry to attend to the whole context"
        )


def _dtype(fields: _Fields) -> str:
    """Name of the dtype the checkpoint was saved in: fp32, fp16 or bf16 (transformers 5 `dtype`, before `torch_dtype`)."""
    text = fields.get("dtype", str, None) or fields.get("torch_dtype", str, "float32")
    names = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
    if text not in names:
        raise ConfigError(f"{fields.origin}: dtype must be one of {', '.join(names)}, got {text!r}")
    return names[text]


def _eos(generation: Mapping[str, Any], config: Mapping[str, Any], origin: str) -> tuple[int, ...]:
    value = generation.get("eos_token_id")
    value = config.get("eos_token_id") if value is None else value
    ids = () if value is None else (value,) if isinstance(value, int) else value
    if not isinstance(ids, list | tuple) or not all(
        isinstance(i, int) and not isinstance(i, bool) for i in ids
    ):
        raise ConfigError(f"{origin}: eos_token_id must be an id or a list of ids, got {value!r}")
    return tuple(ids)


def _rope(fields: _Fields) -> RopeParameters:
    """`rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of earlier files."""
    theta, longest = fields.number("rope_theta", 10000.0), fields.size("max_position_embeddings")
    given = fields.get("rope_parameters", dict, None) or fields.get("rope_scaling", dict, None) or {}
    if given.get("partial_rotary_factor", 1.0) != 1.0 or fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"{fields.origin}: partial rotary embeddings are not supported")
    original = fields.get("original_max_position_embeddings", int, None)
    if original is not None:
        given = {"original_max_position_embeddings": original, **given}
    try:
        return RopeParameters.parse(given, theta, longest)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{fields.origin}: {error}") from error


def _mla(fields: _Fields) -> MlaConfig:
    return MlaConfig(
        q_lora_rank=fields.size("q_lora_rank", None),
        kv_lora_rank=fields.size("kv_lora_rank"),
        nope_dim=fields.size("qk_nope_head_dim"),
        rope_dim=fields.size("qk_rope_head_dim"),
        v_dim=fields.size("v_head_dim"),
    )


def _moe(fields: _Fields) -> MoeConfig:
    scoring = fields.get("scoring_func", str, "sigmoid")
    method = fields.get("topk_method", str, "noaux_tc")
    if (scoring, method) != ("sigmoid", "noaux_tc"):
        raise ConfigError(
            f"{fields.origin}: scoring_func sigmoid with topk_method noaux_tc is supported, got {scoring} with {method}"
        )
    if fields.size("moe_layer_freq", 1) != 1:
        raise ConfigError(f"{fields.origin}: moe_layer_freq must be 1, got {fields.data['moe_layer_freq']}")
    moe = MoeConfig(
        num_experts=fields.size("n_routed_experts"),
        top_k=fields.size("num_experts_per_tok"),
        intermediate_size=fields.size("moe_intermediate_size"),
        num_shared=fields.get("n_shared_experts", int, 0, least=0),
        num_groups=fields.size("n_group", 1),
        top_groups=fields.size("topk_group", 1),
        norm_topk_prob=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        first_dense=fields.get("first_k_dense_replace", int, 0, least=0),
    )
    if moe.num_experts % moe.num_groups or moe.top_groups > moe.num_groups:
        raise ConfigError(
            f"{fields.origin}: {moe.num_experts} experts in n_group = {moe.num_groups} groups of which topk_group = "
            f"{moe.top_groups} are used: the groups must divide the experts, and no more can be used than there are"
        )
    if moe.top_k > moe.num_experts // moe.num_groups * moe.top_groups:
        raise ConfigError(
            f"{fields.origin}: num_experts_per_tok = {moe.top_k} is more than topk_group groups hold"
        )
    return moe


def _windows(fields: _Fields) -> tuple[int, ...]:
    """The window of each layer, 0 for those that see everything; every second layer where nothing is said."""
    window, layers = fields.size("sliding_window", 128), fields.size("num_hidden_layers")
    types = fields.get("layer_types", list, None) or ["sliding_attention", "full_attention"] * layers
    known = {"sliding_attention": window, "full_attention": 0}
    if len(types) < layers or any(kind not in known for kind in types):
        raise ConfigError(
            f"{fields.origin}: layer_types must give each of {layers} layers one of {', '.join(known)}, got {types!r}"
        )
    return tuple(known[kind] for kind in types[:layers])


def _plain_moe(fields: _Fields, architecture: str) -> MoeConfig | None:
    """Experts chosen by the largest probabilities, without groups or shared experts: Mixtral, Qwen3-MoE, gpt-oss."""
    if architecture in ("MixtralForCausalLM", "GptOssForCausalLM"):
        experts, inner, normed = fields.size("num_local_experts"), fields.size("intermediate_size"), True
        dense: tuple[int, ...] = ()
    elif architecture == "Qwen3MoeForCausalLM":
        # transformers 5 writes num_local_experts
        experts = fields.size("num_local_experts", None) or fields.size("num_experts")
        inner = fields.size("moe_intermediate_size")
        normed, step = fields.flag("norm_topk_prob", False), fields.size("decoder_sparse_step", 1)
        only = fields.get("mlp_only_layers", list, [])
        dense = tuple(i for i in range(fields.size("num_hidden_layers")) if i in only or (i + 1) % step)
    else:
        return None
    top_k = fields.size("num_experts_per_tok")
    if top_k > experts:
        raise ConfigError(
            f"{fields.origin}: num_experts_per_tok = {top_k} is more than the {experts} experts"
        )
    return MoeConfig(experts, top_k, inner, 0, 1, 1, normed, 1.0, 0, "softmax", False, dense)


SIDECARS = (
    ("hf_quant_config.json", "modelopt"),
    ("quantize_config.json", "gptq"),
    ("quant_config.json", "awq"),
)
"""Files that say how weights are quantized where config.json does not, and the method each belongs to."""


def _quantization(folder: Path) -> Mapping[str, Any] | None:
    """What config.json or a file beside it says of quantization."""
    path = folder / "config.json"
    data = read_json(path)
    for name in ("quantization_config", "compression_config"):
        if data.get(name):
            given = data[name]
            if not isinstance(given, dict):
                raise ConfigError(f"{path}: entry {name!r} must be an object, got {given!r}")
            return given if name == "quantization_config" else {"quant_method": "compressed-tensors", **given}
    for name, method in SIDECARS:
        if (folder / name).is_file():
            return {"quant_method": method, **read_json(folder / name)}
    return None


def _checked_quantization(fields: _Fields) -> Mapping[str, Any] | None:
    """The entry, once its format has read it."""
    given: Mapping[str, Any] | None = fields.get("quantization_config", dict, None)
    if given is not None:
        from gristmill.quant.formats import FormatError, open_format

        try:
            open_format(given, f"{fields.origin}: quantization_config")
        except FormatError as error:
            raise ConfigError(str(error)) from error
    return given
