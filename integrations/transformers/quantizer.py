"""transformers' quantizer interface: linear layers rounded when a model is loaded, and directories of gristmill's format, both ways."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from gristmill import nn, quantize_module
from gristmill.kernel_registry.scheme import QuantScheme

SCALE_DTYPES = {
    "e8m0": torch.uint8,
    "e4m3": torch.float8_e4m3fn,
    "fp32": torch.float32,
    "fp16": torch.float16,
}


class GristmillConfig(QuantizationConfigMixin):  # type: ignore[misc]  # transformers carries no types here
    """``from_pretrained(path, quantization_config=GristmillConfig("int4_g128"))``: linear layers in a scheme of gristmill.

    Args:
        scheme: ``int4_g128``, ``mxfp4``, ``nvfp4``, ``fp8_block`` ...
        modules_to_not_convert: names that stay in floats, in addition to the logits head; None = the logits head only.

    Raises:
        ValueError: an unknown scheme, or one that also quantizes activations.
    """

    def __init__(
        self,
        scheme: str = "int4_g128",
        modules_to_not_convert: Iterable[str] | None = None,
        version: int = 1,
        **_: Any,
    ) -> None:
        parsed = QuantScheme.parse(scheme)
        if parsed.is_dense:
            raise ValueError(f"{scheme} is no quantized scheme: load the model with dtype={scheme!r} instead")
        if version != 1:
            raise ValueError(
                f"version {version} of the format was written by a newer gristmill; this one reads 1"
            )
        self.quant_method = "gristmill"
        self.version = version
        self.scheme = str(parsed)
        self.modules_to_not_convert = None if modules_to_not_convert is None else list(modules_to_not_convert)

    def to_dict(self) -> dict[str, Any]:
        """The ``quantization_config`` of config.json, which gristmill's own loader reads, too."""
        found = {"quant_method": "gristmill", "version": self.version, "scheme": self.scheme}
        if self.modules_to_not_convert is not None:
            found["modules_to_not_convert"] = self.modules_to_not_convert
        return found


class GristmillQuantizer(HfQuantizer):  # type: ignore[misc]  # transformers carries no types here
    """Puts `gristmill.nn.Linear` into a model: from floats after they were loaded, or from stored codes."""

    def validate_environment(self, *_: Any, **kwargs: Any) -> None:
        """ValueError for a device map that leaves parameters on disk: they could not be packed."""
        placed = kwargs.get("device_map")
        if isinstance(placed, dict) and "disk" in placed.values():
            raise ValueError(
                "gristmill packs weights on the device that runs them; device_map puts some on disk"
            )

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        if self.pre_quantized:
            scheme = QuantScheme.parse(self.quantization_config.scheme)
            for name in self._layers(model):
                layer = model.get_submodule(name)
                _replace(model, name, _Stored(layer, scheme))
        return model

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        if not self.pre_quantized:
            chosen = set(self._layers(model))
            skip = [name for name, _ in model.named_modules() if name not in chosen]
            return quantize_module(model, self.quantization_config.scheme, skip=skip)
        stored = [(name, module) for name, module in model.named_modules() if isinstance(module, _Stored)]
        for name, module in stored:
            _replace(model, name, module.packed(name))
        return model

    def _layers(self, model: Any) -> list[str]:
        """The names of the linear layers that are quantized."""
        left = self.get_modules_to_not_convert(
            model,
            self.quantization_config.modules_to_not_convert,
            model._keep_in_fp32_modules,
            add_default_skips=True,
        )
        return [
            name
            for name, module in model.named_modules()
            if type(module) is torch.nn.Linear and should_convert_module(name, left)
        ]

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """Whether `save_pretrained` works: it writes a directory that `from_pretrained` and `gristmill.LLM` read."""
        return True

    @property
    def is_trainable(self) -> bool:
        """No gradient passes through the kernels."""
        return False

    @property
    def is_compileable(self) -> bool:
        """Each layer is one operator in a graph."""
        return True


class _Stored(torch.nn.Module):
    """Where transformers puts the tensors of a stored layer, before they are packed."""

    def __init__(self, layer: torch.nn.Linear, scheme: QuantScheme) -> None:
        super().__init__()
        n, k = layer.weight.shape
        self.scheme, self.shape = scheme, (n, k)
        self.dtype = layer.weight.dtype
        meta = torch.device("meta")
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "codes": ((n, scheme.code_bytes(k)), torch.uint8)
        }
        scales = scheme.scale_shape(n, k)
        if scales is not None:
            self.scale_dtype = SCALE_DTYPES.get(str(scheme.scale_dtype), torch.bfloat16)
            shapes["scales"] = (scales, self.scale_dtype)
            if not scheme.symmetric:
                shapes["zero"] = (scales, torch.uint8 if scheme.zero_points else torch.float32)
        if scheme.has_global:
            shapes["global_scale"] = ((1,), torch.float32)
        for name, (shape, dtype) in shapes.items():
            held = torch.empty(shape, dtype=dtype, device=meta)
            self.register_parameter(name, torch.nn.Parameter(held, requires_grad=False))
        self.bias = layer.bias
        self.fields = {name: dtype for name, (_, dtype) in shapes.items()}

    def packed(self, name: str) -> nn.Linear:
        """The layer, once its tensors were loaded; ValueError where one is missing or does not fit."""
        held: dict[str, Tensor] = {}
        for field, dtype in self.fields.items():
            tensor = getattr(self, field)
            if not getattr(
                tensor, "_is_hf_initialized", False
            ):  # transformers' mark of what it has read; the rest is noise
                raise ValueError(f"{name}.{field} is missing in the checkpoint")
            tensor = tensor.detach()
            held[field] = tensor if tensor.dtype == dtype else tensor.to(dtype)
        try:
            weight = nn.from_fields(held, self.scheme, self.shape)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{name}: {error}") from error
        bias = None if self.bias is None else self.bias.detach()
        return nn.Linear(weight, bias, dtype=self.dtype)


def _replace(model: Any, name: str, module: torch.nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
