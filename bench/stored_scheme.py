"""The schemes in which a checkpoint stores its linear weights, from its config.json alone, before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LINEAR, EXPERT = "model.layers.{}.self_attn.o_proj", "model.layers.{}.mlp.experts.0.gate_proj"
"""Modules that represent the linear layers and the experts of a model. They are of a middle layer, because formats may skip the first ones."""


@dataclass(frozen=True)
class Stored:
    """Schemes of the linear layers and of the experts. act_order: the order of columns does not follow the groups."""

    linear: str = "bf16"
    experts: str = "bf16"
    act_order: bool = False


def stored(config: Mapping[str, Any], layers: int) -> Stored:
    """The schemes of ``quantization_config``; bf16 if there is none. FormatError (a ValueError) for an unsupported method."""
    quant = config.get("quantization_config")
    if not quant:
        return Stored()
    from gristmill.quant.formats import FormatError, open_format
    from gristmill.quant.formats.contract import Fields

    stored = open_format(Fields(quant, "quantization_config").data)
    try:
        linear, experts = (stored.scheme_of(name.format(layers // 2)) for name in (LINEAR, EXPERT))
    except FormatError as error:
        raise FormatError(f"{error}; name the scheme with --weights") from error
    return Stored(str(linear or "bf16"), str(experts or "bf16"), stored.ordered)
