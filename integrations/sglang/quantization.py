"""``--quantization gristmill``: the linear layers of SGLang's own models, from every format that gristmill reads, or quantized at load."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.runtime_context import get_lora
from torch import Tensor

from gristmill.integrations.product import stored_scheme
from gristmill.integrations.report import Report
from gristmill.integrations.sglang.linear import GristmillLinearMethod
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant import QuantTensor, Tensors, open_format, quantize
from gristmill.runtime.errors import UsageError

NAME = "gristmill"
AT_LOAD = "quantize_at_load"
ADDED_BY_SGLANG = ("packed_modules_mapping", "hf_config")
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
"""What SGLang's models fuse without saying so in ``packed_modules_mapping``."""
ROUTERS = ("gate", "router", "shared_expert_gate")
"""Linear layers that choose experts: a small error there sends tokens elsewhere."""

REPORT = Report("SGLang", logging.getLogger("gristmill"))


def explain() -> list[dict[str, Any]]:
    """The layers of this process's models, as dicts of `gristmill.integrations.report.Layer`."""
    return REPORT.explain()


class GristmillConfig(QuantizationConfig):  # type: ignore[misc]  # SGLang is read without types
    """What SGLang asks about quantization.

    Args:
        config: ``quantization_config`` of config.json; or {"quantize_at_load": scheme} for a checkpoint in floats.

    Raises:
        UsageError: neither.
        FormatError: a format, or a variant of it, that is not read.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.packed_modules_mapping = {**FUSED, **(config.get("packed_modules_mapping") or {})}
        stored = {name: entry for name, entry in config.items() if name not in ADDED_BY_SGLANG}
        self.scheme: QuantScheme | None = None
        if AT_LOAD in stored:
            self.scheme = QuantScheme.parse(stored[AT_LOAD])
        elif "quant_method" not in stored:
            raise UsageError(
                "--quantization gristmill of a model in floats needs a scheme: --json-model-override-args "
                f"""'{{"quantization_config": {{"quant_method": "gristmill", "{AT_LOAD}": "int4_g128"}}}}'"""
            )
        self.format = None if self.scheme is not None else open_format(stored)

    def get_name(self) -> str:
        """The name of the option."""
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Dtypes of activations."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """The oldest GPU that some kernel is compiled for."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: the configuration is in config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> GristmillConfig:
        """The configuration from ``quantization_config``."""
        return cls(config)

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None) -> str | None:
        """Claim a quantized checkpoint, of whatever format, if the user says ``--quantization gristmill``."""
        return NAME if user_quant == NAME and hf_quant_cfg else None

    def get_scaled_act_names(self) -> list[str]:
        """None: inputs are scaled before the product."""
        return []

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """The method of a linear layer; None for every other layer. UsageError: experts, and with --enable-lora."""
        lora = get_lora()
        if lora.enable_lora or lora.lora_paths:
            raise UsageError(
                "--quantization gristmill does not serve LoRA: leave out --enable-lora and --lora-paths"
            )
        if isinstance(layer, FusedMoE):
            raise UsageError(f"--quantization gristmill does not serve experts in SGLang ({prefix})")
        if not isinstance(layer, LinearBase):
            return None
        modules = self._modules(prefix)
        scheme: str | None
        if self.format is None:
            if prefix.rpartition(".")[2] in ROUTERS:
                REPORT.leave(prefix, "", "it is a router, which keeps its floats")
                return UnquantizedLinearMethod()
            scheme = str(self.scheme)
        else:
            scheme = stored_scheme(self.format, modules)
            if scheme == "":
                REPORT.leave(prefix, "", "it is stored in floats")
                return UnquantizedLinearMethod()
        return GristmillLinearMethod(prefix, modules, self._read, scheme, REPORT, self.scheme is not None)

    def _modules(self, prefix: str) -> Sequence[str]:
        """The modules of the checkpoint that a layer of SGLang's model is made of."""
        parent, dot, name = prefix.rpartition(".")
        return [f"{parent}{dot}{part}" for part in self.packed_modules_mapping.get(name, [name])]

    def _read(
        self, source: Tensors, module: str, shape: tuple[int, ...]
    ) -> tuple[QuantTensor, Tensor | None]:
        if self.scheme is not None:
            return quantize(source.read(f"{module}.weight", shape), self.scheme), None
        stored = None if self.format is None else self.format.read(source, module, shape)
        if stored is None:
            return QuantTensor.from_dense(source.read(f"{module}.weight", shape)), None
        return stored.weight, stored.pre_scale
