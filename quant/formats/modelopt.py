"""NVIDIA ModelOpt checkpoints, ``quant_method: modelopt`` or hf_quant_config.json.

========================  ==================================================================================================
NVFP4, W4A16_NVFP4,       ``weight`` uint8 [N, K/2], ``weight_scale`` e4m3 [N, K/16], ``weight_scale_2`` float32, a
NVFP4_AWQ                 *multiplier*: W = e2m1 * scale * scale_2; ``input_scale`` float32, a multiplier too
MXFP4, W4A8_MXFP4_FP8     ``weight`` uint8 [N, K/2], ``weight_scale`` uint8 E8M0 [N, K/32]; zeros are stored as -0
MXFP8                     ``weight`` e4m3 [N, K], ``weight_scale`` uint8 E8M0 [N, K/32]
FP8                       ``weight`` e4m3, ``weight_scale`` float32, ``input_scale`` float32
FP8_PER_CHANNEL_PER_TOKEN ``weight`` e4m3, ``weight_scale`` float32 [N]
FP8_PB_WO                 ``weight`` e4m3, ``weight_scale`` float32 [N/128, 1, K/128, 1]
========================  ==================================================================================================

``pre_quant_scale`` [K], if it was not folded into a previous layer, multiplies x. MIXED_PRECISION lists its modules,
each with an algorithm; modules it does not list, and those that ``exclude_modules`` or ``ignore`` match (names, parents,
shell patterns), are stored in floats. Source: ModelOpt's export of unified Hugging Face checkpoints.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import BLOCK, QuantScheme
from gristmill.quant.formats.contract import (
    FLOATS,
    Fields,
    Format,
    FormatError,
    FormatSpec,
    Place,
    Source,
    StoredWeight,
    as_bytes,
    as_float32,
    make,
    need,
    new_codes,
    one_number,
)
from gristmill.quant.formats.writers import E4M3, SchemeWriter, field
from gristmill.quant.tensor import QuantTensor

ALGORITHMS: dict[str, tuple[str, str | None]] = {
    "NVFP4": ("nvfp4", "nvfp4"),
    "NVFP4_AWQ": ("nvfp4", "nvfp4"),
    "W4A16_NVFP4": ("nvfp4", None),
    "MXFP4": ("mxfp4", "mxfp4"),
    "W4A8_MXFP4_FP8": ("mxfp4", "fp8"),
    "MXFP8": ("mxfp8", "mxfp8"),
    "FP8": ("fp8", "fp8"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8_ch", "fp8_token"),
    "FP8_PB_WO": ("fp8_block", None),
}
"""Algorithm -> scheme of the weights, and the activation format it declares."""


class ModelOpt(Format):
    """A checkpoint of ``quant_method: modelopt``."""

    name = "modelopt"

    def __init__(self, config: Mapping[str, Any], where: str = "quantization_config") -> None:
        fields = Fields(config, where)
        if isinstance(config.get("quantization"), Mapping):  # the contents of hf_quant_config.json
            fields = fields.section("quantization")
        self.origin = fields.origin
        self.algorithm: str = fields.get("quant_algo", str).upper()
        self.excluded = fields.strings("exclude_modules") + fields.strings("ignore")
        stored: str | None = fields.get("kv_cache_quant_algo", str, None)
        self.kv_cache = None if stored is None or stored.upper() == "NONE" else stored.lower()
        self.layers: dict[str, str] = {}
        if self.algorithm == "MIXED_PRECISION":
            layers = fields.section("quantized_layers")
            for module in layers.data:
                layer = layers.section(module)
                self.layers[module] = _checked_algorithm(layer, layer.get("quant_algo", str).upper())
        else:
            _checked_algorithm(fields, self.algorithm)

    def rule(self, module: str) -> str | None:
        """The algorithm of a module, None when it is not quantized."""
        if any(_lists(pattern, module) for pattern in self.excluded):
            return None
        if self.algorithm != "MIXED_PRECISION":
            return self.algorithm
        algorithms: set[str] = {
            algorithm for pattern, algorithm in self.layers.items() if _lists(pattern, module)
        }
        if len(algorithms) > 1:
            raise FormatError(
                f"{module}: {self.origin}.quantized_layers gives it several: {', '.join(sorted(algorithms))}"
            )
        return algorithms.pop() if algorithms else None

    def scheme_of(self, module: str) -> QuantScheme | None:
        """The scheme of the module's algorithm."""
        algorithm = self.rule(module)
        return None if algorithm is None else QuantScheme.parse(ALGORITHMS[algorithm][0])

    def read(
        self, source: Source, module: str, shape: tuple[int, ...], place: Place = new_codes
    ) -> StoredWeight | None:
        """The weight of a module, None where it is stored in floats."""
        algorithm = self.rule(module)
        if algorithm is None:
            return None
        need(source, module, (".weight",), algorithm)
        scheme = QuantScheme.parse(ALGORITHMS[algorithm][0])
        names = [f"{module}.weight"]
        scales, multiplier = None, None
        if scheme.bits == 4:
            codes = source.read(names[0], (*shape[:-1], shape[-1] // 2), dtypes=(torch.uint8,))
        else:
            codes = as_bytes(source.read(names[0], shape, dtypes=(torch.float8_e4m3fn,)))
        need(source, module, (".weight_scale",), algorithm)
        names.append(f"{module}.weight_scale")
        if scheme.granularity == "tensor":
            multiplier = one_number(source, names[1])
        else:
            scales = _scales(source, module, shape, scheme)
        if scheme.weight == "nvfp4":
            need(source, module, (".weight_scale_2",), algorithm)
            names.append(f"{module}.weight_scale_2")
            multiplier = one_number(source, names[2])
        weight = make(module, codes, scales, shape, scheme, global_scale=multiplier)
        input_scale, pre_scale = None, None
        if f"{module}.input_scale" in source:
            names.append(f"{module}.input_scale")
            input_scale = one_number(source, names[-1])
        if f"{module}.pre_quant_scale" in source:
            names.append(f"{module}.pre_quant_scale")
            pre_scale = as_float32(source.read(names[-1], (shape[-1],), dtypes=FLOATS))
        return StoredWeight(weight, tuple(names), ALGORITHMS[algorithm][1], input_scale, pre_scale)


def _checked_algorithm(fields: Fields, algorithm: str) -> str:
    if algorithm not in ALGORITHMS:
        raise FormatError(
            f"{fields.origin}: quant_algo {algorithm} is not read; known: {', '.join(ALGORITHMS)}, MIXED_PRECISION"
        )
    fields.one_of("group_size", (None, 16 if ALGORITHMS[algorithm][0] == "nvfp4" else 32, 0, BLOCK), None)
    return algorithm


def _scales(source: Source, module: str, shape: tuple[int, ...], scheme: QuantScheme) -> Tensor:
    name, (n, k) = f"{module}.weight_scale", shape[-2:]
    expected = (*shape[:-2], *(scheme.scale_shape(n, k) or ()))
    if scheme.granularity == "block":
        if n % BLOCK or k % BLOCK:
            raise FormatError(f"{module}: FP8_PB_WO needs N and K multiples of {BLOCK}, got [{n}, {k}]")
        stored = (*expected[:-1], 1, expected[-1], 1)
        stored_shape = source.spec(name)[1]
        return as_float32(
            source.read(name, expected if stored_shape == expected else stored, dtypes=FLOATS)
        ).reshape(expected)
    if scheme.granularity == "channel":
        stored_shape = source.spec(name)[1]
        return as_float32(
            source.read(name, expected if stored_shape == expected else expected[:-1], dtypes=FLOATS)
        ).reshape(expected)
    size = scheme.group_size or k
    if k % size:
        raise FormatError(f"{module}: {scheme} has groups of {size} along K, and K is {k}")
    dtype = torch.float8_e4m3fn if scheme.weight == "nvfp4" else torch.uint8
    return source.read(name, expected, dtypes=(dtype,))


def _lists(pattern: str, module: str) -> bool:
    """A name, a parent's name, or a shell pattern."""
    return fnmatchcase(module, pattern) or f"{module}.".startswith(f"{pattern}.")


class ModelOptWriter(SchemeWriter):
    """NVIDIA ModelOpt, weight-only if it has such an algorithm."""

    name = "modelopt"
    ALGORITHMS: Mapping[str, str] = {
        "nvfp4": "W4A16_NVFP4",
        "mxfp4": "MXFP4",
        "mxfp8": "MXFP8",
        "fp8_ch": "FP8_PER_CHANNEL_PER_TOKEN",
    }

    def holds(self, scheme: QuantScheme) -> bool:
        return str(scheme) in self.ALGORITHMS

    def tensors(self, weight: QuantTensor) -> dict[str, Tensor]:
        scales = field(weight.scales)
        stored = {
            "weight": weight.codes if self.scheme.bits == 4 else weight.codes.view(E4M3),
            "weight_scale": scales[:, 0].contiguous() if self.scheme.granularity == "channel" else scales,
        }
        if weight.global_scale is not None:
            stored["weight_scale_2"] = weight.global_scale.reshape(())
        return stored

    def config(self, kept: Collection[str]) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "quant_method": "modelopt",
            "quant_algo": self.ALGORITHMS[str(self.scheme)],
            "exclude_modules": sorted({"lm_head", *kept}),
        }
        return fields | ({"group_size": self.scheme.group_size} if self.scheme.granularity == "group" else {})


def claims(config: Mapping[str, Any]) -> bool:
    """``modelopt_fp4`` and the like; or hf_quant_config.json's entries, with no method."""
    method = config.get("quant_method")
    if method is None:
        return "quantization" in config or "quant_algo" in config
    return isinstance(method, str) and method.startswith("modelopt")


FORMAT = FormatSpec("modelopt", ModelOpt, ModelOptWriter, claims, sidecar="hf_quant_config.json")
