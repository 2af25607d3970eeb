"""How a checkpoint stores its linear weights, from its config.json alone: what its layers will be called with, before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LINEAR, EXPERT = "model.layers.{}.self_attn.o_proj", "model.layers.{}.mlp.experts.0.gate_proj"
"""Modules that stand for a model's linear layers and for its experts, of a layer in its middle: formats may leave the first ones out."""


@dataclass(frozen=True)
class Stored:
    """Schemes of the linear layers and of the experts. act_order: columns belong to groups in any order."""

    linear: str = "bf16"
    experts: str = "bf16"
    act_order: bool = False


def stored(config: Mapping[str, Any], layers: int) -> Stored:
    """What ``quantization_config`` says; bf16 where there is none. FormatError (a ValueError) for a method that is not read."""
    quant = config.get("quantization_config")
    if not quant:
        return Stored()
    from gristmill.quant import formats
    from gristmill.quant.formats.contract import Fields

    found = formats.open_format(Fields(quant, "quantization_config").data)
    linear, experts = (_scheme(found, name.format(layers // 2)) for name in (LINEAR, EXPERT))
    return Stored(linear, experts, bool(getattr(found, "ordered", False)))


def _scheme(found: Any, module: str) -> str:
    """The scheme of one module by a format's rules."""
    from gristmill.kernel_registry.scheme import QuantScheme
    from gristmill.quant import formats
    from gristmill.quant.formats.modelopt import ALGORITHMS

    if isinstance(found, formats.Awq | formats.Gptq):
        rule = (
            (4, found.group, not found.zero_point) if isinstance(found, formats.Awq) else found.rule(module)
        )
        return (
            "bf16"
            if rule is None
            else str(
                QuantScheme.integer(rule[0], None if rule[1] == -1 else rule[1], zero_points=not rule[2])
            )
        )
    if isinstance(found, formats.CompressedTensors):
        group = found.rule(module)
        return "bf16" if group is None or group.scheme is None else str(group.scheme)
    if isinstance(found, formats.ModelOpt):
        algorithm = found.rule(module)
        return "bf16" if algorithm is None else ALGORITHMS[algorithm][0]
    if isinstance(found, formats.DeepSeekFp8):
        return "fp8_block" if found.blocks else "fp8"
    if isinstance(found, formats.Mxfp4):
        return "mxfp4" if ".experts." in module else "bf16"
    if isinstance(found, formats.Gristmill):
        return str(found.scheme)
    raise formats.FormatError(
        f"quantization_config: {found.name} does not say how every layer is stored; name the scheme with --weights"
    )
