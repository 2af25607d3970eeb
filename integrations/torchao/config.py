"""torchao's configuration object for the schemes of gristmill, and what `quantize_` does with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchao.core.config import AOBaseConfig
from torchao.quantization.transform_module import _QUANTIZE_CONFIG_HANDLER

from gristmill import nn
from gristmill.kernel_registry.scheme import QuantScheme


@dataclass
class GristmillConfig(AOBaseConfig):  # type: ignore[misc]  # torchao carries no types here
    """Weights in a scheme of gristmill: ``int4_g128``, ``mxfp4``, ``nvfp4``, ``fp8_block`` ...; ValueError for an unknown one."""

    scheme: str = "int4_g128"

    def __post_init__(self) -> None:
        self.scheme = str(QuantScheme.parse(self.scheme))


def enable() -> None:
    """Let torchao's `quantize_` take a `GristmillConfig`. Calling it again changes nothing."""
    _QUANTIZE_CONFIG_HANDLER[GristmillConfig] = _quantized


def disable() -> None:
    """Undo `enable`. Models that were quantized stay as they are."""
    _QUANTIZE_CONFIG_HANDLER.pop(GristmillConfig, None)


def _quantized(
    module: torch.nn.Module, config: GristmillConfig, *, parameter_name: str = "weight"
) -> torch.nn.Module:
    """The layer that takes the place of `module`; TypeError for anything but the weight of a `torch.nn.Linear`."""
    if type(module) is not torch.nn.Linear or parameter_name != "weight":
        raise TypeError(
            f"gristmill quantizes the weight of torch.nn.Linear, got {parameter_name} of {type(module).__name__}: "
            "leave it out with filter_fn"
        )
    return nn.Linear.from_float(module, config.scheme)
