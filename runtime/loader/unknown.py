"""What is said of an architecture that no family declares: the nearest one that is known, and what its configuration asks for that no layer
computes.

Every family reads the configuration, as far as it gets; what none of them asked for, and what none takes, is what a new family would have
to add. An entry that is null, false, 0, 1 or empty switches nothing on.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from gristmill.kernels.rope.cache import KINDS
from gristmill.runtime.config import ACTIVATIONS, CHUNKED, FULL, SLIDING, Fields
from gristmill.runtime.errors import ConfigError
from gristmill.runtime.models import families

ACTIVATION_ENTRIES = ("hidden_act", "hidden_activation", "activation_function")
WITHOUT_MEANING = frozenset(
    [
        "_name_or_path",
        "architectures",
        "model_type",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "initializer_range",
        "auto_map",
        "id2label",
        "label2id",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "max_window_layers",
        "pretraining_tp",
        "output_router_logits",
        "router_aux_loss_coef",
        "aux_loss_alpha",
        "seq_aux",
        "router_jitter_noise",
        "quantization_config",
        "num_nextn_predict_layers",
        "cache_implementation",
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "rms_norm_eps",
        "max_position_embeddings",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "task_specific_params",
        "problem_type",
        "num_labels",
        "chunk_size_feed_forward",
        "return_dict",
        "output_hidden_states",
        "output_attentions",
        "is_decoder",
        "partial_rotary_factor",
        "qk_head_dim",
        "rotary_dim",
    ]
)
"""Entries that every decoder has, and those about files and training."""
SHOWN = 8


class _Seen(dict[str, Any]):
    """A configuration that remembers which of its entries were read."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        super().__init__(data)
        self.seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)


def unknown(data: Mapping[str, Any], names: list[Any]) -> str:
    """What the message about the architectures `names` of a config.json says of them; "" if there is nothing near and nothing strange."""
    near = [near for name in names if (near := _nearest(str(name)))]
    strange = [*_refused(data), *_unread(data)]
    text = f"; nearest: {near[0]}" if near else ""
    if strange:
        more = f" and {len(strange) - SHOWN} more" if len(strange) > SHOWN else ""
        text += f"; of its configuration, no layer knows {', '.join(strange[:SHOWN])}{more}"
    return text


def _nearest(name: str) -> str:
    """The known architecture with the most similar name, "" if none is. What it is for ("ForCausalLM") decides among equals."""

    def likeness(known: str) -> tuple[float, float]:
        stem, other = (text.partition("For")[0].removesuffix("Model").lower() for text in (name, known))
        return difflib.SequenceMatcher(None, stem, other).ratio(), difflib.SequenceMatcher(
            None, name, known
        ).ratio()

    best = max(families(), key=likeness)
    return best if likeness(best)[0] >= 0.6 else ""


def _refused(data: Mapping[str, Any]) -> Iterator[str]:
    """Entries that are known, with values that are not."""
    for entry in ACTIVATION_ENTRIES:
        if isinstance(given := data.get(entry), str) and given not in ACTIVATIONS:
            yield f"{entry}={given!r}"
    kinds = data.get("layer_types") or ()
    if strange := sorted({str(kind) for kind in kinds} - {FULL, SLIDING, CHUNKED}):
        yield f"layer_types {', '.join(strange)}"
    tables = [data.get("rope_parameters") or {}, data.get("rope_scaling") or {}]
    tables += [table for outer in tables for table in outer.values() if isinstance(table, Mapping)]
    for table in tables:
        kind = table.get("rope_type", table.get("type"))
        if isinstance(kind, str) and kind not in (*KINDS, "su", "proportional"):
            yield f"rope_type={kind!r}"


def _unread(data: Mapping[str, Any]) -> Iterator[str]:
    """Entries that no family reads."""
    seen = _Seen(data)
    for architecture, family in families().items():
        with contextlib.suppress(ConfigError, ValueError, TypeError, KeyError):
            family.config(Fields(seen, "", family.entries), architecture)
    for name, value in data.items():
        known = name in seen.seen or name in WITHOUT_MEANING or name in ACTIVATION_ENTRIES
        if known or name.endswith(("_token_id", "dropout", "_pdrop", "_dropout_prob")):
            continue
        if value and value != 1 and value != "silu":
            yield f"{name}={_short(value)}"


def _short(value: Any) -> str:
    """A value of the configuration, as far as it fits into a line."""
    if isinstance(value, Mapping):
        return "{...}"
    text = repr(value)
    return text if len(text) <= 30 else f"{text[:27]}..."
