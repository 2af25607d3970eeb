"""``--quantization gristmill``: vLLM's own models with gristmill's kernels, from every format that gristmill reads, or quantized at load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.models.utils import WeightsMapper

from gristmill.integrations.product import stored_scheme
from gristmill.integrations.vllm.experts import (
    GristmillExpertsMethod,
    faster_experts,
    stored_names,
    unserved_experts,
)
from gristmill.integrations.vllm.linear import GristmillLinearMethod
from gristmill.integrations.vllm.options import Options
from gristmill.integrations.vllm.report import REPORT
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant import QuantTensor, Tensors, open_format, quantize
from gristmill.runtime.errors import UsageError

NAME = "gristmill"
ROUTERS = ("gate", "router", "shared_expert_gate")
"""Linear layers that choose experts: a small error there sends tokens elsewhere."""
OVERRIDES = (
    "auto_gptq",
    "gptq_marlin",
    "auto_awq",
    "awq_marlin",
    "modelopt",
    "modelopt_fp4",
    "modelopt_mxfp8",
    "modelopt_mixed",
)
"""Methods of vLLM that serve checkpoints of another name, in the order in which it asks them."""
ADDED_BY_VLLM = ("total_num_heads", "total_num_kv_heads")


def name_in_vllm(stored: Mapping[str, Any]) -> str:
    """The method that vLLM itself chooses for a checkpoint: Marlin's for ``gptq``, say."""
    for name in OVERRIDES:
        if name in QUANTIZATION_METHODS:
            found = get_quantization_config(name).override_quantization_method(dict(stored), None)
            if found is not None:
                return str(found)
    return str(stored.get("quant_method"))


class GristmillConfig(QuantizationConfig):  # type: ignore[misc]  # vLLM is read without types
    """What vLLM asks about quantization.

    Args:
        stored: the configuration of a quantized checkpoint; None = floats, quantized at load to the scheme of `Options`.
    """

    def __init__(self, stored: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.stored = None if stored is None else {k: v for k, v in stored.items() if k not in ADDED_BY_VLLM}
        # Compiled graphs and processes get a copy of this object, so the format is opened where it is needed.
        if self.stored is not None:
            open_format(self.stored)

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
        """None: without a configuration in config.json the model is quantized at load."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> GristmillConfig:
        """The configuration of a quantized checkpoint; FormatError for a format, or a variant of it, that is not read."""
        return cls(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Claim a quantized checkpoint, of whatever format, if the user says ``--quantization gristmill``."""
        return NAME if user_quant == NAME and hf_quant_cfg else None

    def get_checkpoint_weight_mapper(self) -> Any:
        """Names stay as they are: act-order is read too. Where a checkpoint has none, vLLM's own methods have no parameter for GPTQ's groups."""
        ordered = self.stored is None or self.stored.get("desc_act", True)
        return WeightsMapper(orig_to_new_suffix={} if ordered else {".g_idx": None})

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """The method of a linear or expert layer; None for every other layer. UsageError with --enable-lora."""
        if get_current_vllm_config().lora_config is not None:
            raise UsageError("--quantization gristmill does not serve LoRA: leave out --enable-lora")
        if isinstance(layer, LinearBase):
            return self._linear(layer, prefix)
        if isinstance(layer, RoutedExperts):
            return self._experts(layer, prefix)
        return None

    def _linear(self, layer: Any, prefix: str) -> Any:
        modules = self._modules(prefix)
        scheme: str | None
        if self._is_ours() and prefix.rpartition(".")[2] in ROUTERS:
            REPORT.leave(prefix, "", "it is a router, which keeps its floats")
            return UnquantizedLinearMethod()
        if self.stored is None:
            scheme = str(self._scheme())
        else:
            scheme = stored_scheme(open_format(self.stored), modules)
            if scheme == "":
                REPORT.leave(prefix, "", "it is stored in floats")
                return UnquantizedLinearMethod()
        names = [module.rpartition(".")[2] for module in modules]
        return GristmillLinearMethod(
            prefix,
            names,
            self._read,
            scheme,
            lambda made: self._of_vllm(made, prefix),
            measured=self._is_measured(),
        )

    def _experts(self, layer: Any, prefix: str) -> Any:
        scheme: str | None
        if self.stored is None:
            scheme = str(self._scheme())
        else:
            scheme = stored_scheme(
                open_format(self.stored), [f"{prefix}.0.{stored_names(layer, prefix)['w1']}"]
            )
        device, times = torch.empty(0, dtype=torch.float32).device, ""
        if scheme == "":
            reason: str | None = "they are stored in floats"
        else:
            reason = unserved_experts(layer, scheme, device)
        if reason is None and scheme is not None and self._is_measured():
            choice = faster_experts(layer, prefix, scheme, lambda made: self._of_vllm(made, prefix), device)
            reason, times = choice.reason, choice.times
        if reason is None:
            return GristmillExpertsMethod(layer.moe_config, prefix, self._read, times)
        REPORT.leave(prefix, scheme or "", reason)
        return _in_floats(layer) if scheme == "" else self._of_vllm(layer, prefix)

    def _of_vllm(self, layer: Any, prefix: str) -> Any:
        """What vLLM itself does with a layer of this checkpoint; UsageError where it cannot read the format."""
        if self.stored is None:
            return _in_floats(layer)
        if self._is_ours():
            raise UsageError(f"{prefix}: vLLM does not read checkpoints of gristmill")
        name = name_in_vllm(self.stored)
        try:
            config = get_quantization_config(name).from_config(dict(self.stored))
        except ValueError as error:
            raise UsageError(f"{prefix}: neither gristmill nor vLLM serves {name} here: {error}") from error
        config.packed_modules_mapping = self.packed_modules_mapping
        return config.get_quant_method(layer, prefix) or _in_floats(layer)

    def _is_ours(self) -> bool:
        """Whether gristmill chooses which layers are quantized: at load, or when it wrote the checkpoint."""
        return self.stored is None or self.stored.get("quant_method") == NAME

    def _is_measured(self) -> bool:
        """Whether times decide which layers are taken: of a model that is quantized at load vLLM has no method of the same scheme."""
        return self.stored is not None and self._options().take == "measured"

    def _modules(self, prefix: str) -> list[str]:
        """The modules of the checkpoint that a layer of vLLM's model is made of."""
        parent, _, name = prefix.rpartition(".")
        return [
            f"{parent}.{part}" if parent else part for part in self.packed_modules_mapping.get(name, [name])
        ]

    @staticmethod
    def _options() -> Options:
        return Options.parse(get_current_vllm_config().additional_config)

    def _scheme(self) -> QuantScheme:
        named = self._options().quant
        if named is None:
            raise UsageError(
                "--quantization gristmill of a model in floats needs a scheme: "
                """--additional-config '{"gristmill": {"quant": "int4_g128"}}'"""
            )
        return QuantScheme.parse(named)

    def _read(
        self, source: Tensors, module: str, shape: tuple[int, ...]
    ) -> tuple[QuantTensor, Tensor | None]:
        if self.stored is not None:
            found = open_format(self.stored).read(source, module, shape)
            if found is not None:
                return found.weight, found.pre_scale
        weight = source.read(f"{module}.weight", shape)
        return (
            QuantTensor.from_dense(weight) if self.stored is not None else quantize(weight, self._scheme())
        ), None


def _in_floats(layer: Any) -> Any:
    """vLLM's method of a layer without quantization."""
    if isinstance(layer, RoutedExperts):
        return UnquantizedFusedMoEMethod(layer.moe_config)
    return UnquantizedLinearMethod()
