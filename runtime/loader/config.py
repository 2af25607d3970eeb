"""Opening a model on disk, and its ModelConfig, from config.json or its equivalent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gristmill.kernels.rope.cache import RopeParameters
from gristmill.quant.checkpoints.checkpoint import Checkpoint
from gristmill.quant.checkpoints.gguf import GgufCheckpoint
from gristmill.quant.checkpoints.safetensors import SafetensorsCheckpoint
from gristmill.quant.formats import FormatError, open_format
from gristmill.quant.formats.gguf import GgufArchitecture
from gristmill.runtime.config import Fields, ModelConfig
from gristmill.runtime.errors import ConfigError
from gristmill.runtime.hub import local_model
from gristmill.runtime.models import families, reported


def open_checkpoint(path: str | Path | Checkpoint) -> Checkpoint:
    """The model at a path: a GGUF file, or a Hugging Face directory, whose files are read on first use. An open one is returned. What is
    no path but the name of a repository, as `local_model` takes it, is fetched.

    Raises:
        ConfigError: as `local_model`. CheckpointError: a damaged GGUF file.
    """
    if not isinstance(path, str | Path):
        return path
    place = local_model(path)
    if place.suffix == ".gguf" and not place.is_dir():
        return GgufCheckpoint(place, gguf_architectures())
    return SafetensorsCheckpoint(place)


def gguf_architectures() -> tuple[GgufArchitecture, ...]:
    """The GGUF architectures that model families declare."""
    by_family = {family.name: family.gguf for family in families().values()}
    return tuple(architecture for declared in by_family.values() for architecture in declared)


def load_config(path: str | Path) -> ModelConfig:
    """The configuration of a model: a directory, a GGUF file, or a name as of `local_model`.

    Raises:
        ConfigError: no such directory, no config.json, an unsupported architecture or feature, an entry that is
            missing or of the wrong type. CheckpointError: a damaged GGUF file.
    """
    return parse_config(*open_checkpoint(path).config())


def parse_config(
    data: Mapping[str, Any], generation: Mapping[str, Any] | None = None, origin: str = "config.json"
) -> ModelConfig:
    """The configuration from the contents of config.json and generation_config.json."""
    fields, known = Fields(data, origin), families()
    architectures = fields.get("architectures", list)
    architecture = next((a for a in architectures if a in known), None)
    if architecture is None:
        raise ConfigError(
            f"{origin}: architecture {', '.join(map(str, architectures)) or '(none)'} is not supported; known: "
            f"{', '.join(known)}{reported()}"
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
    special = known[architecture].config(fields, architecture)
    if "windows" not in special:
        _no_window(fields, architecture)
    values: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": fields.size("vocab_size"),
        "hidden_size": hidden,
        "num_layers": fields.size("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "intermediate_size": fields.size("intermediate_size"),
        "rms_eps": fields.number("rms_norm_eps", 1e-6),
        "max_position": fields.size("max_position_embeddings"),
        "rope": _rope(fields),
        "rope_interleaved": False,
        "tie_embeddings": fields.flag("tie_word_embeddings", False),
        "attention_bias": fields.flag("attention_bias", False),
        "mlp_bias": fields.flag("mlp_bias", False),
        "dtype": _dtype(fields),
        "eos_ids": _eos(generation or {}, data, origin),
        "quantization": _quantization(fields),
    }
    values |= special
    if "head_dim" not in values:
        values["head_dim"] = fields.size("head_dim", None) or hidden // heads
    return ModelConfig(**{"rope_dim": values["head_dim"], **values})


def _no_window(fields: Fields, architecture: str) -> None:
    """For families without windows: refuse a window, unless it is at least the model's positions."""
    window, positions = fields.size("sliding_window", None), fields.size("max_position_embeddings")
    if window is not None and window < positions:
        raise ConfigError(
            f"{fields.origin}: {architecture} has no sliding window, got sliding_window = {window} with {positions} positions; "
            "remove the entry to attend to the whole context"
        )


def _dtype(fields: Fields) -> str:
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


def _rope(fields: Fields) -> RopeParameters:
    """`rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of earlier files."""
    theta, longest = fields.number("rope_theta", 10000.0), fields.size("max_position_embeddings")
    entries = fields.get("rope_parameters", dict, None) or fields.get("rope_scaling", dict, None) or {}
    if entries.get("partial_rotary_factor", 1.0) != 1.0 or fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"{fields.origin}: partial rotary embeddings are not supported")
    original = fields.get("original_max_position_embeddings", int, None)
    if original is not None:
        entries = {"original_max_position_embeddings": original, **entries}
    try:
        return RopeParameters.parse(entries, theta, longest)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{fields.origin}: {error}") from error


def _quantization(fields: Fields) -> Mapping[str, Any] | None:
    """The entry, after its format has validated it."""
    entry: Mapping[str, Any] | None = fields.get("quantization_config", dict, None)
    if entry is not None:
        try:
            open_format(entry, f"{fields.origin}: quantization_config")
        except FormatError as error:
            raise ConfigError(str(error)) from error
    return entry
