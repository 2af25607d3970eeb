"""A GGUF file as a checkpoint: its configuration in terms of config.json, its tokenizer, its tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gristmill.quant.checkpoints.chat_files import ChatFiles, directory_chat_files, gguf_chat_files
from gristmill.quant.checkpoints.checkpoint import NoTokenizerError, read_tokenizer
from gristmill.quant.checkpoints.gguf_tokenizer import gguf_tokenizer
from gristmill.quant.errors import CheckpointError, ConfigError
from gristmill.quant.formats import FormatError
from gristmill.quant.formats.gguf import DENSE, GgufArchitecture, GgufFile


class GgufCheckpoint(GgufFile):
    """A GGUF file of one of these `architectures`, a `Checkpoint`.

    Raises:
        CheckpointError: a damaged file, or an unsupported architecture or type of tensor.
    """

    def __init__(self, path: str | Path, architectures: Iterable[GgufArchitecture]) -> None:
        try:
            super().__init__(path, tuple(architectures))
        except FormatError as error:
            raise CheckpointError(str(error)) from error

    def config(self) -> tuple[Mapping[str, Any], Mapping[str, Any], str]:
        """The equivalent of config.json.

        Raises:
            ConfigError: unsupported rotary scaling or experts.
        """
        return gguf_config(self), {}, str(self.path)

    def tokenizer(self) -> Any:
        """The tokenizer of a tokenizer.json next to the file, else the one in the file; built once."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Any:
        beside = self.path.parent / "tokenizer.json"
        if beside.is_file():
            return read_tokenizer(beside)
        try:
            return gguf_tokenizer(self.tokenizer_fields(), str(self.path))
        except ConfigError as error:
            raise NoTokenizerError(str(error)) from error

    def chat_files(self) -> ChatFiles:
        """Of the file; a tokenizer_config.json or chat_template.jinja next to it comes first."""
        beside = directory_chat_files(self.path.parent)
        inside = gguf_chat_files(self.tokenizer_fields(), str(self.path))
        return ChatFiles({**inside.templates, **beside.templates}, {**inside.tokens, **beside.tokens})

    def read(
        self,
        name: str,
        shape: tuple[int, ...] | None = None,
        *,
        dtypes: Collection[torch.dtype] | None = None,
    ) -> Tensor:
        """As `GgufFile.read`; CheckpointError if the tensor is missing or not as expected."""
        try:
            return super().read(name, shape, dtypes=dtypes)
        except FormatError as error:
            raise CheckpointError(str(error)) from error

    def fields(self, prefix: str) -> Mapping[str, Any]:
        """As `GgufFile.fields`, with CheckpointError."""
        try:
            return super().fields(prefix)
        except FormatError as error:
            raise CheckpointError(str(error)) from error


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """The equivalent of config.json for the model in a file. Errors as in `GgufCheckpoint.config`."""
    path, own = file.path, file.architecture
    if "model.embed_tokens.weight" not in file:
        raise CheckpointError(f"{path} has no tensor token_embd.weight")
    prefix = f"{own.name}."
    values = {key.removeprefix(prefix): _one(value) for key, value in file.fields(prefix).items()}
    heads = values.get("attention.head_count")
    data: dict[str, Any] = {
        "architectures": [own.model],
        "vocab_size": file.shape("model.embed_tokens.weight")[0],
        "hidden_size": values.get("embedding_length"),
        "num_hidden_layers": values.get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": values.get("attention.head_count_kv", heads),
        "head_dim": values.get("attention.key_length"),
        "intermediate_size": values.get("feed_forward_length"),
        "rms_norm_eps": values.get("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": values.get("context_length"),
        "rope_theta": values.get("rope.freq_base", 10000.0),
        "tie_word_embeddings": "lm_head.weight" not in file,
        "attention_bias": "model.layers.0.self_attn.o_proj.bias" in file,
        "dtype": "bfloat16",
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if any(kind not in DENSE for kind in file.kinds.values()):
        data["quantization_config"] = {"quant_method": "gguf"}
    attention, rope = "model.layers.0.self_attn", _rope(path, values, file)
    values["fused_qkv"] = f"{attention}.qkv_proj.weight" in file
    values["q_bias"] = any(f"{attention}.{part}_proj.bias" in file for part in ("q", "qkv"))
    values["q_norm"] = f"{attention}.q_norm.weight" in file
    values["rope_scaling"] = rope.get("rope_scaling", {})
    values["file"] = file
    data |= {**_experts(path, own, values), **rope, **own.config(values)}
    fields = {name: value for name, value in data.items() if value is not None}
    rotated = values.get("rope.dimension_count")
    if own.paired or rotated is None:
        _check_rotation(path, fields, rotated, len(file.rope_factors))
    else:
        fields.setdefault("rotary_dim", rotated)
    return fields


def _one(value: Any) -> Any:
    """A value that is given for each layer, once if it is the same for all."""
    return value[0] if isinstance(value, list) and value and value.count(value[0]) == len(value) else value


def _check_rotation(path: Path, config: Mapping[str, Any], rotated: Any, factors: int) -> None:
    """ConfigError unless whole heads are rotated, with one frequency factor per pair of a head."""
    hidden, heads, width = (config.get(name) for name in ("hidden_size", "num_attention_heads", "head_dim"))
    if isinstance(heads, int) and heads < 1:
        raise ConfigError(f"{path}: attention.head_count must be at least 1, got {heads}")
    if width is None and isinstance(hidden, int) and isinstance(heads, int):
        width = hidden // heads
    if isinstance(width, int) and rotated not in (None, width):
        raise ConfigError(
            f"{path}: rope.dimension_count must be {width}, the width of a head, got {rotated!r}"
        )
    if isinstance(width, int) and factors not in (0, width // 2):
        raise ConfigError(
            f"{path}: rope_freqs.weight must have {width // 2} numbers, one for each pair of a head, got {factors}"
        )


def _experts(path: Path, own: GgufArchitecture, values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a mixture of experts: the k most probable ones, with weights normalized to sum to 1."""
    if not own.experts:
        return {}
    strange = (
        {}
        if own.routed
        else {
            "expert_shared_count": 0,
            "expert_weights_scale": 1.0,
            "expert_group_count": 0,
            "expert_gating_func": 1,
        }
    )
    for key, usual in strange.items():
        if values.get(key, usual) not in (usual, 0):
            raise ConfigError(f"{path}: {own.name}.{key} = {values[key]} is not supported in GGUF files")
    return {
        "num_experts_per_tok": values.get("expert_used_count"),
        "num_local_experts": values.get("expert_count"),
        "moe_intermediate_size": values.get("expert_feed_forward_length"),
    }


def _rope(path: Path, values: Mapping[str, Any], file: GgufFile) -> dict[str, Any]:
    kind, factors = values.get("rope.scaling.type", "none"), file.rope_factors
    original = values.get("rope.scaling.original_context_length")
    if file.long_factors:
        return {
            "original_max_position_embeddings": original,
            "rope_scaling": {
                "rope_type": "longrope",
                "attention_factor": values.get("rope.scaling.attn_factor"),
                **{entry: list(numbers) for entry, numbers in file.long_factors.items()},
            },
        }
    if kind == "none":
        return {"rope_scaling": {"rope_type": "default", "factors": factors}} if factors else {}
    if factors:
        raise ConfigError(
            f"{path}: rope_freqs.weight with rope.scaling.type {kind!r} is not supported; known: with none"
        )
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"{path}: rope.scaling.type {kind!r} is not supported; known: none, linear, yarn")
    if values.get("rope.scaling.yarn_ext_factor", 1.0) != 1:
        raise ConfigError(
            f"{path}: rope.scaling.yarn_ext_factor must be 1, got {values['rope.scaling.yarn_ext_factor']!r}"
        )
    table = {
        "rope_type": kind,
        "factor": values.get("rope.scaling.factor"),
        "rope_theta": values.get("rope.freq_base", 1e4),
        "attention_factor": values.get("rope.scaling.yarn_attn_factor"),
        "beta_fast": values.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": values.get("rope.scaling.yarn_beta_slow"),
    }
    return {
        "rope_scaling": table | ({} if original is None else {"original_max_position_embeddings": original})
    }
