"""A GGUF file in place of a model directory: its configuration as config.json would have it, its tensors as a checkpoint.

Its tokenizer is `gristmill.runtime.loader.gguf_tokenizer`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gristmill.quant.formats import FormatError
from gristmill.quant.formats.gguf import GgufFile
from gristmill.runtime.errors import CheckpointError, ConfigError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
"""ggml's architectures -> ours; "llama" with experts is Mixtral."""


class GgufCheckpoint(GgufFile):
    """The tensors of a GGUF file, with the errors of a checkpoint."""

    def __init__(self, path: str | Path) -> None:
        try:
            super().__init__(path)
        except (FormatError, ImportError) as error:
            raise CheckpointError(str(error)) from error

    @property
    def directory(self) -> Path:
        """What messages call the checkpoint: the file."""
        return self.path

    def read(
        self,
        name: str,
        shape: tuple[int, ...] | None = None,
        *,
        dtypes: Collection[torch.dtype] | None = None,
    ) -> Tensor:
        """As `GgufFile.read`; CheckpointError when the tensor is not there or not as expected."""
        try:
            return super().read(name, shape, dtypes=dtypes)
        except FormatError as error:
            raise CheckpointError(str(error)) from error

    def tokenizer(self) -> Mapping[str, Any]:
        """As `GgufFile.tokenizer`, with CheckpointError."""
        try:
            return super().tokenizer()
        except FormatError as error:
            raise CheckpointError(str(error)) from error


def is_gguf(path: str | Path) -> bool:
    """Whether a path names a GGUF file."""
    return Path(path).suffix == ".gguf"


def gguf_config(path: str | Path) -> dict[str, Any]:
    """What config.json would say of the model in a file.

    Raises:
        CheckpointError: the file's faults. ConfigError: an architecture that is not supported, a scaling of positions that
            the keys do not describe.
    """
    file = GgufCheckpoint(path)
    own, known = file.architecture, ", ".join(ARCHITECTURES)
    if own not in ARCHITECTURES:
        raise ConfigError(f"{path}: architecture {own!r} is not supported in GGUF files; known: {known}")
    if "model.embed_tokens.weight" not in file:
        raise CheckpointError(f"{path} has no tensor token_embd.weight")
    values = {
        key.removeprefix(f"{own}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{own}.")
    }
    heads = values.get("attention.head_count")
    data: dict[str, Any] = {
        "architectures": [ARCHITECTURES[own]],
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
        "quantization_config": {"quant_method": "gguf"},
    }
    data |= _experts(path, own, values) | _rope(path, values, file.rope_factors)
    found = {name: value for name, value in data.items() if value is not None}
    _check_rotation(path, found, values.get("rope.dimension_count"), len(file.rope_factors))
    return found


def _check_rotation(path: str | Path, config: Mapping[str, Any], rotated: Any, factors: int) -> None:
    """ConfigError unless whole heads are rotated, and factors of frequencies are as many as pairs of a head."""
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


def _experts(path: str | Path, own: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """What a mixture of experts adds: the k most probable of them, their weights made to sum to 1."""
    count = values.get("expert_count", 0)
    if not count:
        return {}
    strange = {
        "expert_shared_count": 0,
        "expert_weights_scale": 1.0,
        "expert_group_count": 0,
        "expert_gating_func": 1,
    }
    for key, usual in strange.items():
        if values.get(key, usual) not in (usual, 0):
            raise ConfigError(f"{path}: {own}.{key} = {values[key]} is not supported in GGUF files")
    used = {"num_experts_per_tok": values.get("expert_used_count"), "num_local_experts": count}
    if own == "llama":
        return {"architectures": ["MixtralForCausalLM"], **used}
    inner = values.get("expert_feed_forward_length")
    return {
        **used,
        "moe_intermediate_size": inner,
        "intermediate_size": values.get("feed_forward_length", inner),
        "norm_topk_prob": True,
    }


def _rope(path: str | Path, values: Mapping[str, Any], factors: tuple[float, ...]) -> dict[str, Any]:
    kind = values.get("rope.scaling.type", "none")
    if kind == "none":
        return {"rope_scaling": {"rope_type": "default", "factors": factors}} if factors else {}
    if factors:
        raise ConfigError(
            f"{path}: rope_freqs.weight with rope.scaling.type {kind!r} is not supported; known: with none"
        )
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"{path}: rope.scaling.type {kind!r} is not supported; known: none, linear, yarn")
    table = {
        "rope_type": kind,
        "factor": values.get("rope.scaling.factor"),
        "rope_theta": values.get("rope.freq_base", 1e4),
    }
    original = values.get("rope.scaling.original_context_length")
    return {
        "rope_scaling": table | ({} if original is None else {"original_max_position_embeddings": original})
    }
