"""Opening a model on disk, and its ModelConfig, from config.json or its equivalent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gristmill.quant.checkpoints.checkpoint import Checkpoint
from gristmill.quant.checkpoints.colbert import ARCHITECTURE as COLBERT
from gristmill.quant.checkpoints.colbert import METADATA, ColbertCheckpoint
from gristmill.quant.checkpoints.files import read_json
from gristmill.quant.checkpoints.gguf import GgufCheckpoint
from gristmill.quant.checkpoints.native import NativeCheckpoint
from gristmill.quant.checkpoints.safetensors import SafetensorsCheckpoint
from gristmill.quant.checkpoints.text_part import TextPart, TextPartCheckpoint
from gristmill.quant.formats import FormatError, open_format
from gristmill.quant.formats.gguf import GgufArchitecture
from gristmill.runtime.config import Fields, ModelConfig, labels
from gristmill.runtime.errors import ConfigError, UsageError
from gristmill.runtime.hub import local_model
from gristmill.runtime.integers import described
from gristmill.runtime.loader.unknown import unknown
from gristmill.runtime.models import families, native_layouts, reported, text_parts
from gristmill.runtime.rope_entries import model_rope, rotated


def open_checkpoint(path: str | Path | Checkpoint) -> Checkpoint:
    """The model at a path: a GGUF file, a Hugging Face directory, or one in the layout of the models' own code that a family declares
    (`NativeLayout`), whose files are read on first use. Of a directory with more than a text model, or an encoder, that part is opened. An open
    one is returned. What is no path but the name of a repository, as `local_model` takes it, is fetched.

    Raises:
        ConfigError: as `local_model`. CheckpointError: a damaged GGUF file.
    """
    if not isinstance(path, str | Path):
        if not callable(getattr(path, "config", None)):
            raise UsageError(f"a model is a path or the name of a repository, as text, got {described(path)}")
        return path
    place = local_model(path)
    if place.suffix == ".gguf" and not place.is_dir():
        return GgufCheckpoint(place, gguf_architectures())
    for layout in native_layouts():
        if NativeCheckpoint.is_at(place, layout):
            return NativeCheckpoint(place, layout)
    try:
        data = read_json(place / "config.json")
    except ConfigError:
        data = {}  # reported where it is read
    if (part := _text_part(data)) is not None:
        return TextPartCheckpoint(place, part)
    if (encoder := _colbert_encoder(place, data)) is not None:
        return ColbertCheckpoint(place, encoder)
    return SafetensorsCheckpoint(place)


def _text_part(data: Mapping[str, Any]) -> TextPart | None:
    """What family reads the text model of a directory whose model has other parts too; None = no family, or it is no such model."""
    named, parts = data.get("architectures"), text_parts()
    names = map(str, named) if isinstance(named, list) else ()
    return next((parts[name] for name in names if name in parts), None)


def _colbert_encoder(folder: Path, data: Mapping[str, Any]) -> str | None:
    """The architecture of the encoder in a directory of Stanford ColBERT; None = no family has it, or it is no such directory."""
    if data.get("architectures") != [COLBERT] and not (folder / METADATA).is_file():
        return None
    encoders = (family.architectures for family in families().values() if family.encodes)
    found = (name for names in encoders for name, kind in names.items() if kind == data.get("model_type"))
    return next((name for name in found if name.endswith("Model")), None)


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
    given, architecture = _known(architectures, known)
    if architecture is None:
        raise ConfigError(
            f"{origin}: architecture {', '.join(map(str, architectures)) or '(none)'} is not supported"
            f"{unknown(data, architectures)}; known: {', '.join(known)}{reported()}"
        )
    family = known[architecture]
    fields = Fields({**family.defaults.get(architecture, {}), **data}, origin, family.entries)
    heads = fields.size("num_attention_heads")
    hidden = fields.size("hidden_size")
    kv_heads = fields.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{origin}: num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})"
        )
    special = family.config(fields, architecture)
    classes = labels(fields, given)
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
        "rope_interleaved": False,
        "tie_embeddings": fields.flag("tie_word_embeddings", False),
        "attention_bias": fields.flag("attention_bias", False),
        "mlp_bias": fields.flag("mlp_bias", False),
        "dtype": _dtype(fields),
        "eos_ids": _eos(generation or {}, data, origin, fields.size("vocab_size")),
        "quantization": _quantization(fields),
        "labels": classes,
        "task": "score" if classes else "embed" if family.encodes or given != architecture else "generate",
    }
    values |= special
    if values.get("bidirectional") and values["task"] == "generate":
        values["task"] = "embed"
    if values["rms_eps"] < 0:
        raise ConfigError(f"{origin}: the epsilon of norms must be at least 0, got {values['rms_eps']}")
    if "activation" not in special and (act := fields.get("hidden_act", str, "silu")) not in (
        "silu",
        "swish",
    ):
        raise ConfigError(f"{origin}: hidden_act must be silu, got {act!r}")
    if "head_dim" not in values:
        values["head_dim"] = fields.size("head_dim", None) or hidden // heads
    if "rope" not in values:
        values |= model_rope(fields)
    if "rope_dim" not in values:
        values["rope_dim"] = _whole_heads(fields, architecture, values["head_dim"])
    _check_ropes(values, origin)
    return ModelConfig(**values)


def _known(architectures: Sequence[Any], known: Mapping[str, Any]) -> tuple[str, str | None]:
    """The first architecture that is supported, and the one that families name: of a decoder without its head, or with a classifier in its place
    (``Qwen3Model``, ``Gemma3TextModel``, ``Qwen3ForSequenceClassification``), the one with the head. None = none is."""
    for given in map(str, architectures):
        if given in known:
            return given, given
        for ending in ("TextModel", "Model", "TextForSequenceClassification", "ForSequenceClassification"):
            whole = f"{given.removesuffix(ending)}ForCausalLM"
            if given.endswith(ending) and whole in known:
                return given, whole
    return "", None


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


def _eos(
    generation: Mapping[str, Any], config: Mapping[str, Any], origin: str, vocab_size: int
) -> tuple[int, ...]:
    """Ids outside the vocabulary, such as -1 for "none", are left out: no token has them, and a processor of logits would index with them."""
    value = generation.get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    else:
        origin = f"generation_config.json beside {origin}"
    ids = () if value is None else (value,) if isinstance(value, int) else value
    if not isinstance(ids, list | tuple) or not all(
        isinstance(i, int) and not isinstance(i, bool) for i in ids
    ):
        raise ConfigError(f"{origin}: eos_token_id must be an id or a list of ids, got {value!r}")
    return tuple(i for i in ids if 0 <= i < vocab_size)


def _whole_heads(fields: Fields, architecture: str, head_dim: int) -> int:
    """For families that rotate whole heads: their size. ConfigError where an entry asks for less, which transformers does not read there."""
    count = rotated(fields, head_dim)
    if count != head_dim:
        raise ConfigError(
            f"{fields.origin}: {architecture} rotates whole heads of {head_dim} elements, got {count} by rotary_dim or partial_rotary_factor"
        )
    return count


def _check_ropes(values: Mapping[str, Any], origin: str) -> None:
    """ConfigError where frequencies do not fit the rotated part, or long ones would be needed for layers that have frequencies of their own."""
    of_layers = [rope for rope in values.get("layer_ropes", ()) if rope is not None]
    longest = max(values["max_position"], values.get("long_position", 0))
    if any(rope.kind == "longrope" and rope.original < longest for rope in of_layers):
        raise ConfigError(
            f"{origin}: longrope is supported where all layers have the same frequencies, not by kind of layer"
        )
    for rope in (values["rope"], values.get("long_rope")):
        pairs = values["rope_dim"] // 2
        if (
            rope is not None
            and rope.kind == "longrope"
            and not (len(rope.factors) == pairs and all(0 < factor < math.inf for factor in rope.factors))
        ):
            raise ConfigError(
                f"{origin}: short_factor and long_factor of longrope must be {pairs} positive numbers, one for each rotated pair of a head, got "
                f"{list(rope.factors)}"
            )


def _quantization(fields: Fields) -> Mapping[str, Any] | None:
    """The entry, after its format has validated it."""
    entry: Mapping[str, Any] | None = fields.get("quantization_config", dict, None)
    if entry is not None:
        try:
            open_format(entry, f"{fields.origin}: quantization_config")
        except FormatError as error:
            raise ConfigError(str(error)) from error
    return entry
