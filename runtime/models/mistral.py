"""Mistral (Jiang et al., 2023, arXiv:2310.06825): Llama, in its first version with a sliding window. Ministral has windows in some layers.

Mistral's own directories are read by `mistral_native`. Ministral 3 (2025) has queries that grow by the
logarithm of their position, as Llama 4's, and yarn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill.quant.checkpoints.text_part import TextPart
from gristmill.quant.formats.gguf import GgufArchitecture
from gristmill.runtime.config import SLIDING, Fields, QueryScale, layer_windows
from gristmill.runtime.models import Family
from gristmill.runtime.models.llama import GGUF_ATTENTION, GGUF_MLP, Llama, decoder_table
from gristmill.runtime.models.mistral_native import NATIVE
from gristmill.runtime.rope_entries import need_rope


def config(fields: Fields, architecture: str) -> Mapping[str, Any]:
    """The window of every layer, null = none; the factor of queries of Ministral 3."""
    values: dict[str, Any] = {
        "windows": layer_windows(fields, fields.size("sliding_window", None), (SLIDING,)),
        "rope_interleaved": fields.flag("rope_interleave", False),
    }
    rope = Fields(fields.get("rope_parameters", dict, None) or {}, f"{fields.origin}: rope_parameters")
    if architecture == "Ministral3ForCausalLM":
        need_rope(fields)
    growth = rope.number("llama_4_scaling_beta", 0.0)
    if growth:
        values["query_scale"] = QueryScale(growth, rope.size("original_max_position_embeddings"))
    return values


def _gguf(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Entries of config.json from a file's keys, of which one is mscale_all_dim; mscale is 1 in all models."""
    rope = {"rope_theta": values.get("rope.freq_base", 1e4), **values["rope_scaling"]}
    if mscale := values.get("rope.scaling.yarn_log_multiplier"):
        rope |= {"mscale": 1.0, "mscale_all_dim": mscale}
    return {"rope_parameters": rope | {"llama_4_scaling_beta": values.get("attention.temperature_scale")}}


FAMILY = Family(
    name="Mistral",
    architectures={
        "MistralForCausalLM": "mistral",
        "MinistralForCausalLM": "ministral",
        "Ministral3ForCausalLM": "ministral3",
    },
    table=decoder_table,
    model=Llama,
    config=config,
    defaults={
        "MistralForCausalLM": {"sliding_window": 4096},
        "MinistralForCausalLM": {"sliding_window": 4096},
        "Ministral3ForCausalLM": {"rms_norm_eps": 1e-5},
    },
    native=NATIVE,
    gguf=(
        GgufArchitecture(
            "mistral3", "Ministral3ForCausalLM", GGUF_ATTENTION | GGUF_MLP, paired=True, config=_gguf
        ),
    ),
    # Files of such models give null, which a text_config is read without: no window, where other files would leave out that of the class.
    texts={"Mistral3ForConditionalGeneration": TextPart("MistralForCausalLM", {"sliding_window": None})},
)
