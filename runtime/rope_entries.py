"""The entries of config.json about rotary embeddings: frequencies of a model or by kind of layer, and how much of a head is rotated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.kernels.rope.cache import KINDS, RopeParameters
from gristmill.runtime.config import FULL, SLIDING, Fields, layer_kinds
from gristmill.runtime.errors import ConfigError

ROPE_NUMBERS = (
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
)
"""Entries of a rotary embedding that are numbers."""


def parse_rope(fields: Fields, entries: Mapping[str, Any], theta: float) -> RopeParameters:
    """The frequencies that the entries of a ``rope_parameters`` or a ``rope_scaling`` give; `theta` where they have none. The original length
    beside the table, as in files of Phi-3, counts before the one in it. The two bounds of llama3 may be one, as in Llama 4 Scout: then no
    wavelength lies between them."""
    if not isinstance(entries, Mapping):
        raise ConfigError(
            f"{fields.origin}: entries of a rotary embedding must be an object, got {entries!r}"
        )
    kind = entries.get("rope_type", entries.get("type")) or "default"
    if kind not in (*KINDS, "su"):
        raise ConfigError(
            f"{fields.origin}: rope type {kind!r} is not supported; supported: {', '.join(KINDS)}"
        )
    table = Fields(entries, f"{fields.origin}: rotary embedding of type {kind!r}")
    for name in ROPE_NUMBERS:
        table.number(name, None)
    for name in ("short_factor", "long_factor"):
        factors = entries.get(name) or ()
        if not isinstance(factors, Sequence) or not all(
            isinstance(factor, int | float) for factor in factors
        ):
            raise ConfigError(
                f"{table.origin}: entry {name!r} must be a list of numbers, got {str(factors)[:100]}"
            )
    bound = entries.get("low_freq_factor")
    if isinstance(bound, int | float) and bound == entries.get("high_freq_factor"):
        entries = {**entries, "high_freq_factor": math.nextafter(bound, math.inf)}
    original = fields.get("original_max_position_embeddings", int, None)
    if original is not None:
        entries = {**entries, "original_max_position_embeddings": original}
    try:
        rope = RopeParameters.parse(entries, theta, fields.size("max_position_embeddings"))
        if not math.isfinite(rope.table_factor):
            raise ValueError(f"the factor of its cosines is {rope.table_factor}")
    except ZeroDivisionError as error:  # the logarithm of 1
        raise ConfigError(f"{table.origin}: original_max_position_embeddings must be over 1") from error
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"{table.origin}: {error}") from error
    return rope


def rope_table(fields: Fields) -> Mapping[str, Any]:
    """The entries of ``rope_parameters`` of transformers 5, by kind of layer where a file has them so, or of ``rope_scaling`` of earlier files.

    Raises:
        ConfigError: both are there, and say different things. Programs differ in which one counts, so that a scaling that was added to the
            other would be ignored.
    """
    given: Mapping[str, Any] = fields.get("rope_parameters", dict, None) or {}
    earlier: Mapping[str, Any] = fields.get("rope_scaling", dict, None) or {}
    counts = given.get(FULL) if {FULL, SLIDING} & given.keys() else given
    if isinstance(counts, Mapping) and counts and earlier:
        here, there = _with_one_type(counts), _with_one_type(earlier)
        if differ := sorted(name for name, value in there.items() if here.get(name) != value):
            raise ConfigError(
                f"{fields.origin}: rope_scaling and rope_parameters differ in {', '.join(differ)}: put the entries that are meant into "
                "rope_parameters, which files of transformers 5 have, and remove rope_scaling"
            )
    return given or earlier


def _with_one_type(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The entries with the type under its present name alone, also where it is left out."""
    kind = entries.get("rope_type", entries.get("type")) or "default"
    return {name: value for name, value in entries.items() if name != "type"} | {"rope_type": kind}


def model_rope(fields: Fields) -> dict[str, Any]:
    """`rope` of a model: of ``rope_parameters`` of transformers 5, of full attention where they are by kind of layer, or of ``rope_theta`` and
    ``rope_scaling`` of earlier files. Those of longrope have a second set of frequencies for sequences longer than the original length."""
    entries = rope_table(fields)
    entries, theta = entries.get(FULL) or entries, fields.number("rope_theta", 10000.0)
    rope, longest = parse_rope(fields, entries, theta), fields.size("max_position_embeddings")
    if rope.kind != "longrope" or rope.original >= longest:
        return {"rope": rope}
    long = parse_rope(fields, {**entries, "short_factor": entries.get("long_factor")}, theta)
    return {"rope": rope, "max_position": rope.original, "long_position": longest, "long_rope": long}


def need_rope(fields: Fields) -> None:
    """For families whose frequencies are scaled where no entry says otherwise, by numbers that differ between their models."""
    if not (fields.data.get("rope_parameters") or fields.data.get("rope_scaling")):
        raise ConfigError(
            f"{fields.origin}: entry 'rope_parameters' (in earlier files 'rope_scaling') is missing: the scaling of the rotary embedding is not known"
        )


def by_layer_kind(fields: Fields) -> Mapping[str, Any]:
    """``rope_parameters`` of a family that has them by kind of layer; {} if there are none. ConfigError if they are for all layers alike,
    or as `rope_table`."""
    given: Mapping[str, Any] = fields.get("rope_parameters", dict, None) or {}
    if given and not {FULL, SLIDING} & given.keys():
        raise ConfigError(
            f"{fields.origin}: rope_parameters must have an object for {FULL} and one for {SLIDING}, got {', '.join(given)}"
        )
    rope_table(fields)  # for its error
    return given


def ropes_by_kind(
    fields: Fields, usual: Sequence[str], theta: float, sliding_theta: float
) -> dict[str, tuple[RopeParameters, ...]]:
    """`layer_ropes` of a family whose layers with a window have frequencies of their own, in ``rope_parameters`` of transformers 5 by kind.
    In earlier files, ``rope_scaling`` is about full attention alone."""
    by_kind = by_layer_kind(fields)
    full = by_kind.get(FULL) or fields.get("rope_scaling", dict, None) or {}
    ropes = {
        FULL: parse_rope(fields, full, theta),
        SLIDING: parse_rope(fields, by_kind.get(SLIDING) or {}, sliding_theta),
    }
    return {"layer_ropes": tuple(ropes[kind] for kind in layer_kinds(fields, usual))}


def rotated(fields: Fields, head_dim: int | None = None, usual: float = 1.0) -> int:
    """Elements of a head that are rotated: ``rotary_dim``, or a share of the head, `usual` where no entry gives it.

    Args:
        head_dim: None = as config.json has it.

    Raises:
        ConfigError: they are not an even number of the head's elements.
    """
    width = (
        head_dim
        or fields.size("head_dim", None)
        or fields.size("hidden_size") // fields.size("num_attention_heads")
    )
    entries = Fields(fields.get("rope_parameters", dict, None) or {}, f"{fields.origin}: rope_parameters")
    share = entries.number("partial_rotary_factor", None) or fields.number("partial_rotary_factor", usual)
    count: int = fields.size("rotary_dim", int(width * share))
    if not 2 <= count <= width or count % 2:
        raise ConfigError(
            f"{fields.origin}: an even number of a head's {width} elements can be rotated, got {count} by rotary_dim or "
            "partial_rotary_factor"
        )
    return count
