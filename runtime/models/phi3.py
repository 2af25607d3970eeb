"""Phi-3 and Phi-4 (arXiv:2404.14219, arXiv:2412.08905): Llama with q, k and v in one tensor, gate and up in another.

Phi-4-mini rotates a part of each head (arXiv:2503.01743). Files with longrope (Phi-3 128k, Phi-4-mini) have one set of frequencies up to the
original length and another beyond it; an engine has one of them, the long one with a ``max_model_len`` beyond that length
(`ModelConfig.for_length`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from gristmill.quant.checkpoints.table import Weight, WeightTable
from gristmill.quant.formats.gguf import GgufArchitecture
from gristmill.runtime.config import SLIDING, Fields, ModelConfig, layer_windows
from gristmill.runtime.errors import ConfigError
from gristmill.runtime.models import Family
from gristmill.runtime.models.llama import GGUF_ATTENTION, Llama, decoder_table, mlp
from gristmill.runtime.rope_entries import rotated


def table(c: ModelConfig) -> WeightTable:
    """Checkpoint tensors -> parameters: Llama's, but for two matrices that are fused in the checkpoint."""
    base = decoder_table(c, lambda name, source, layer: fused_mlp(c, name, source))
    weights = [
        fused(weight, "qkv_proj") if weight.target.endswith(".qkv") else weight for weight in base.weights
    ]
    return replace(base, weights=tuple(weights))


def fused_mlp(c: ModelConfig, name: str, source: str) -> Iterator[Weight]:
    """Llama's feed-forward block, with gate and up in one tensor."""
    for weight in mlp(c, name, f"{source}.mlp"):
        yield fused(weight, "gate_up_proj") if weight.target.endswith(".gate_up") else weight


def fused(weight: Weight, module: str) -> Weight:
    """A weight, or a bias, whose parts are one tensor, that of `module`. Ranks divide each part by itself."""
    part = weight.sources[0].removesuffix(".bias")
    suffix = weight.sources[0].removeprefix(part)
    source = f"{part.rpartition('.')[0]}.{module}{suffix}"
    return replace(weight, sources=(source,), rows=(sum(weight.rows),))


def config(fields: Fields, architecture: str) -> Mapping[str, Any]:
    """The window of every layer, and the rotated part of a head."""
    if fields.number("embd_pdrop", 0.0) or fields.number("resid_pdrop", 0.0):
        raise ConfigError(f"{fields.origin}: dropout is for training; set embd_pdrop and resid_pdrop to 0")
    window = fields.size("sliding_window", None)
    return {"windows": layer_windows(fields, window, (SLIDING,)), "rope_dim": rotated(fields)}


def _gguf(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Entries of config.json from a file's keys; a window of 0 is none."""
    return {"sliding_window": values.get("attention.sliding_window") or None}


GGUF_FUSED = {
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""ggml's names of fused tensors: gate and up have the name of up."""

FAMILY = Family(
    name="Phi-3",
    architectures={"Phi3ForCausalLM": "phi3"},
    table=table,
    model=Llama,
    config=config,
    defaults={"Phi3ForCausalLM": {"rms_norm_eps": 1e-5}},
    gguf=(GgufArchitecture("phi3", "Phi3ForCausalLM", GGUF_ATTENTION | GGUF_FUSED, config=_gguf),),
)
