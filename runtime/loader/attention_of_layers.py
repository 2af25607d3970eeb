"""The attention of each layer by the entries of config.json, in models whose layers differ in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gristmill.kernels.rope.cache import RopeParameters
from gristmill.runtime.config import Fields
from gristmill.runtime.errors import ConfigError
from gristmill.runtime.layer_attention import LayerAttention
from gristmill.runtime.rope_entries import by_layer_kind, parse_rope

ENTRIES = ("head_dim", "num_key_value_heads")


def attention_of_layers(
    fields: Fields,
    kinds: Sequence[str],
    by_kind: Mapping[str, Mapping[str, Any]],
    keys_are_values: Collection[str] = (),
) -> tuple[LayerAttention, ...]:
    """The heads of each layer by ``per_layer_config``, and the layers whose keys and values the last ``num_kv_shared_layers`` read: the last one
    of their kind that has its own. Whole heads are rotated.

    Args:
        kinds: of the layers.
        by_kind: the entries of each kind of layer that differ from the model's, in files without ``per_layer_config``.
        keys_are_values: the kinds in which keys are values too.

    Raises:
        ConfigError: an entry of a layer that is not supported, heads that cannot be shared or rotated, or a layer that finds no keys and values.
    """
    given, origin = fields.get("per_layer_config", dict, None), fields.origin
    heads = fields.size("num_attention_heads")
    usual = (
        fields.size("head_dim", fields.size("hidden_size") // heads),
        fields.size("num_key_value_heads", heads),
    )
    own = kinds[: len(kinds) - fields.get("num_kv_shared_layers", int, 0, least=0)]
    layers: list[LayerAttention] = []
    for index, kind in enumerate(kinds):
        entries = by_kind.get(kind, {}) if given is None else given.get(str(index), {})
        layer = Fields(entries, f"{origin}: per_layer_config of layer {index}")
        if unknown := sorted(layer.data.keys() - {*ENTRIES}):
            raise ConfigError(
                f"{layer.origin}: only {' and '.join(ENTRIES)} may differ, got {', '.join(unknown)}"
            )
        size, kv_heads = layer.size("head_dim", usual[0]), layer.size("num_key_value_heads", usual[1])
        if heads % kv_heads or size % 2:
            raise ConfigError(
                f"{layer.origin}: num_key_value_heads ({kv_heads}) must divide num_attention_heads ({heads}), and head_dim ({size}) be even"
            )
        source = None
        if index >= len(own):
            source = max((i for i, earlier in enumerate(own) if earlier == kind), default=None)
            if source is None:
                raise ConfigError(
                    f"{origin}: num_kv_shared_layers leaves layer {index} no layer before it of {kind} whose keys and values it could read"
                )
            if (layers[source].head_dim, layers[source].kv_heads) != (size, kv_heads):
                raise ConfigError(
                    f"{layer.origin}: other heads than layer {source}, whose keys and values it reads"
                )
        layers.append(LayerAttention(kv_heads, size, size, source, kind in keys_are_values))
    return tuple(layers)


def ropes_of_layers(
    fields: Fields,
    kinds: Sequence[str],
    layers: Sequence[LayerAttention],
    usual: Mapping[str, Mapping[str, Any]],
) -> tuple[RopeParameters, ...]:
    """The frequencies of each layer by ``rope_parameters``, which has entries for each kind of layer; `usual` where it has none.

    The type ``proportional`` (Gemma 4) has pairs over the whole head, of which only the first are rotated, a share of ``partial_rotary_factor``;
    the others have the frequency 0.

    Raises:
        ConfigError: an entry is of the wrong type or not supported.
    """
    given = by_layer_kind(fields)
    ropes = []
    for kind, layer in zip(kinds, layers, strict=True):
        entries = Fields(given.get(kind) or usual[kind], f"{fields.origin}: rope_parameters of {kind}")
        share, factor = entries.number("partial_rotary_factor", 1.0), entries.number("factor", 1.0)
        data = {**entries.data}
        if data.get("rope_type") == "proportional":
            rotated, pairs = int(share * layer.head_dim // 2), layer.head_dim // 2
            if not 0 <= rotated <= pairs:
                raise ConfigError(f"{entries.origin}: partial_rotary_factor must be from 0 to 1, got {share}")
            # Divisors of the frequencies.
            factors = [factor] * rotated + [float("inf")] * (pairs - rotated)
            data |= {"rope_type": "default", "factors": factors}
        elif share != 1:
            raise ConfigError(
                f"{entries.origin}: partial_rotary_factor is for the type proportional, got {share} with {data.get('rope_type')}"
            )
        ropes.append(parse_rope(fields, data, 1e4))
    return tuple(ropes)
