"""compressed-tensors checkpoints (llm-compressor): rules by target, and the formats that they name.

==========================  ================================================================================================
pack-quantized              ``weight_packed`` int32 [N, ceil(K*b/32)], b = 1 to 8, offset binary, dense along K;
                            ``weight_scale`` [N, K/G] or [N, 1]; ``weight_shape`` int64 (N, K); asymmetric:
                            ``weight_zero_point`` int32 [ceil(N*b/32), K/G] packed along N; act-order: ``weight_g_idx``
int-quantized               ``weight`` int8 [N, K], ``weight_scale`` [N, 1], [N, K/G] or [1], ``weight_zero_point`` int8
float-quantized             ``weight`` float8_e4m3fn [N, K], ``weight_scale`` [1], [N, 1], or of 128 x 128 blocks
nvfp4-pack-quantized        ``weight_packed`` uint8 [N, K/2], ``weight_scale`` e4m3 [N, K/16], ``weight_global_scale``
                            float32 [1], a *divisor*: W = e2m1 * scale / global
mxfp4-pack-quantized        ``weight_packed`` uint8 [N, K/2], ``weight_scale`` uint8 E8M0 [N, K/32]
mxfp8-quantized             ``weight`` float8_e4m3fn [N, K], ``weight_scale`` uint8 E8M0 [N, K/32]
==========================  ================================================================================================

``naive-quantized`` is int- or float-quantized, depending on its type. Before 2026 bit widths that do not divide 32 were packed
with padding, 32 // b codes per word; the number of columns of ``weight_packed`` determines the packing. Experts may be [E, N, ...].

A rule is a config group: its ``targets`` are module names, regular expressions after ``re:`` matched from the start, or
the class ``Linear``, which all weights have here. Names take precedence over expressions, and those over the class. Modules that
``ignore`` matches are not quantized. Sources: the package's ``quant_config`` and ``match``, and its compressors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import BLOCK, QuantScheme, cdiv
from gristmill.quant import numeric
from gristmill.quant.formats import _compressed_tensors as stored
from gristmill.quant.formats import words
from gristmill.quant.formats.contract import (
    Fields,
    Format,
    FormatError,
    FormatSpec,
    Place,
    Source,
    StoredWeight,
    new_codes,
)
from gristmill.quant.formats.expressions import expression
from gristmill.quant.formats.writers import E4M3, SchemeWriter, field, zero_codes
from gristmill.quant.rtn import quantize
from gristmill.quant.tensor import QuantTensor

READERS = {
    "pack-quantized": stored.packed,
    "int-quantized": stored.plain,
    "float-quantized": stored.plain,
    "naive-quantized": stored.plain,
    "nvfp4-pack-quantized": stored.nvfp4,
    "mxfp4-pack-quantized": stored.mxfp4,
    "mxfp8-quantized": stored.mxfp8,
}


@dataclass(frozen=True)
class Group:
    """One config group: its targets, their storage, and the declared activations. If `ordered`, columns have a g_idx."""

    name: str
    targets: tuple[str, ...]
    form: str
    scheme: QuantScheme | None
    activation: str | None = None
    static: bool = False
    ordered: bool = False


class CompressedTensors(Format):
    """A checkpoint of ``quant_method: compressed-tensors``."""

    name = "compressed-tensors"

    def __init__(self, config: Mapping[str, Any], where: str = "quantization_config") -> None:
        fields = Fields(config, where)
        for part, key in (("sparsity_config", "format"), ("transform_config", "config_groups")):
            value = fields.get(part, Mapping, {}).get(key)
            if value and value != "dense":
                raise FormatError(f"{where}.{part}: {value!r} is not read")
        self.form = fields.get("format", str, "dense")
        self.ignore = fields.strings("ignore")
        _check_expressions(self.ignore, f"{where}.ignore")
        if fields.data.get("kv_cache_scheme") is not None:
            self.kv_cache = _cache_format(fields.section("kv_cache_scheme"))
        groups = fields.section("config_groups")
        self.groups = tuple(self._group(name, groups) for name in groups.data)

    def _group(self, name: str, groups: Fields) -> Group:
        if isinstance(groups.data[name], Sequence):
            raise FormatError(f"{groups.origin}.{name}: preset schemes are not read; write the scheme out")
        fields = groups.section(name)
        form = fields.get("format", str, None) or self.form
        targets = fields.strings("targets")
        _check_expressions(targets, f"{fields.origin}.targets")
        if form == "dense" or fields.data.get("weights") is None:
            return Group(name, targets, form, None)
        if form not in READERS:
            raise FormatError(f"{fields.origin}: format {form!r} is not read; known: {', '.join(READERS)}")
        weights = fields.section("weights")
        scheme, ordered = (
            weight_scheme(weights, form),
            weights.data.get("actorder") in ("group", "dynamic", True),
        )
        inputs_entry = fields.data.get("input_activations")
        if inputs_entry is None:
            return Group(name, targets, form, scheme, ordered=ordered)
        inputs = fields.section("input_activations")
        static = inputs.data.get("dynamic") is False
        return Group(name, targets, form, scheme, _activation(inputs, scheme), static, ordered)

    def rule(self, module: str) -> Group | None:
        """The config group of a module, None when there is none or it is ignored."""
        if any(_matches(target, module) for target in self.ignore):
            return None
        for kind in (_is_name, _is_expression, _is_class):
            matching = [g for g in self.groups if any(kind(t) and _matches(t, module) for t in g.targets)]
            if len({(g.form, g.scheme) for g in matching}) > 1:
                names = ", ".join(g.name for g in matching)
                raise FormatError(f"{module}: config groups {names} match it and contradict each other")
            if matching:
                return matching[0]
        return None

    def scheme_of(self, module: str) -> QuantScheme | None:
        """The scheme of the module's config group."""
        group = self.rule(module)
        return None if group is None else group.scheme

    def read(
        self, source: Source, module: str, shape: tuple[int, ...], place: Place = new_codes
    ) -> StoredWeight | None:
        """The weight of a module, None where it is stored in floats."""
        group = self.rule(module)
        if group is None or group.scheme is None:
            return None
        if group.ordered and group.form == "pack-quantized" and f"{module}.weight_g_idx" not in source:
            raise FormatError(
                f"{module}: config group {group.name} has actorder by groups, and there is no {module}.weight_g_idx"
            )
        read = READERS[group.form]
        return read(stored.Module(source, module, shape, group.scheme, group.activation, group.static, place))


def _cache_format(fields: Fields) -> str:
    """The number format of ``kv_cache_scheme``: ``fp8`` or another one."""
    bits, kind = fields.get("num_bits", int, 8), fields.one_of("type", ("int", "float"), "int")
    form = "fp8" if (bits, kind) == (8, "float") else f"{kind}{bits}"
    return form if fields.get("symmetric", bool, True) else f"asymmetric {form}"


def weight_scheme(fields: Fields, form: str) -> QuantScheme:
    """The scheme of a group's ``weights``; FormatError if there is no such scheme, or its format does not store it."""
    bits, kind = fields.get("num_bits", int, 8), fields.one_of("type", ("int", "float"), "int")
    size = fields.get("group_size", int, None)
    strategy = fields.get("strategy", str, None) or (
        "tensor" if size is None else "channel" if size == -1 else "group"
    )
    symmetric = fields.get("symmetric", bool, True)
    description = f"{bits}-bit {kind} weights, strategy {strategy}, group size {size}, format {form}"
    name = None
    if kind == "int" and form in ("pack-quantized", "int-quantized", "naive-quantized") and 1 <= bits <= 8:
        if strategy in ("channel", "tensor"):
            return QuantScheme.integer(bits, None, zero_points=not symmetric)
        if strategy == "group" and size is not None and size > 0:
            return QuantScheme.integer(bits, size, zero_points=not symmetric)
    elif kind == "float" and symmetric:
        block = strategy == "block" and list(fields.get("block_structure", (list, tuple), ())) == [
            BLOCK,
            BLOCK,
        ]
        if form in ("float-quantized", "naive-quantized") and bits == 8:
            name = {"tensor": "fp8", "channel": "fp8_ch"}.get(strategy, "fp8_block" if block else None)
        elif form == "nvfp4-pack-quantized" and (bits, size) == (4, 16):
            name = "nvfp4"
        elif (form, bits, size) in (("mxfp4-pack-quantized", 4, 32), ("mxfp8-quantized", 8, 32)):
            name = form[:5]
    if name is None:
        raise FormatError(
            f"{fields.origin}: {description}{'' if symmetric else ', asymmetric'}: no scheme holds these"
        )
    return QuantScheme.parse(name)


def _activation(fields: Fields, weights: QuantScheme) -> str | None:
    """The declared activation format by its name in gristmill, or a description if it has none."""
    bits, kind = fields.get("num_bits", int, 8), fields.get("type", str, "int")
    strategy, size = fields.get("strategy", str, "tensor"), fields.get("group_size", int, None)
    if kind == "float" and bits == 8:
        if strategy == "group" and size == 32:
            return "mxfp8"
        return {"tensor": "fp8", "token": "fp8_token", "group": "fp8_g128"}.get(
            strategy, f"float8 by {strategy}"
        )
    if kind == "float" and bits == 4:
        return "nvfp4" if size == 16 else "mxfp4"
    asymmetric = "" if fields.get("symmetric", bool, True) else ", asymmetric"
    if (kind, bits, strategy, asymmetric) == ("int", 8, "token", ""):
        return "int8_token"
    return f"{kind}{bits} by {strategy}{asymmetric}"


def _is_expression(target: str) -> bool:
    return target.startswith("re:")


def _is_class(target: str) -> bool:
    return target == "Linear"


def _is_name(target: str) -> bool:
    return not _is_expression(target) and not _is_class(target)


def _check_expressions(targets: Sequence[str], where: str) -> None:
    for target in filter(_is_expression, targets):
        expression(target.removeprefix("re:"), where)


def _matches(target: str, module: str) -> bool:
    if _is_expression(target):
        return expression(target.removeprefix("re:"), "quantization_config").match(module) is not None
    return _is_class(target) or target == module


class CompressedTensorsWriter(SchemeWriter):
    """compressed-tensors, one config group for all linears."""

    name = "compressed-tensors"

    def holds(self, scheme: QuantScheme) -> bool:
        if scheme.activation is not None:
            return str(scheme) == "int8_ch.int8_token"
        return not scheme.is_dense and not scheme.minimums

    @property
    def form(self) -> str:
        """The name of the storage."""
        if self.scheme.activation is not None:
            return "int-quantized"
        if self.scheme.is_integer:
            return "pack-quantized"
        if self.scheme.weight == "fp8":
            return "float-quantized"
        return "mxfp8-quantized" if self.scheme.weight == "mxfp8" else f"{self.scheme.weight}-pack-quantized"

    def quantize(self, weight: Tensor) -> QuantTensor:
        """NVFP4's global scale is stored as its reciprocal: it is changed by at most one bit so that the reciprocal is exact."""
        q = quantize(weight, self.scheme)
        if self.scheme.weight != "nvfp4" or q.global_scale is None or _divisor(q.global_scale) is not None:
            return q
        return quantize(weight, self.scheme, global_scale=1 / (1 / q.global_scale))

    def tensors(self, weight: QuantTensor) -> dict[str, Tensor]:
        bits, n, k = self.scheme.bits, weight.n, weight.k
        if self.form == "pack-quantized":
            stored = {
                "weight_packed": words.to_words(weight.codes, cdiv(k * bits, 32)),
                "weight_scale": field(weight.scales),
                "weight_shape": torch.tensor([n, k], dtype=torch.int64),
            }
            if weight.zero is not None:
                along_n = numeric.pack_bits(zero_codes(weight.zero, bits).t().contiguous(), bits)
                stored["weight_zero_point"] = words.to_words(along_n, cdiv(n * bits, 32)).t().contiguous()
            if weight.g_idx is not None:
                stored["weight_g_idx"] = weight.g_idx
            return stored
        if self.form == "int-quantized":
            return {"weight": (weight.codes ^ 0x80).view(torch.int8), "weight_scale": field(weight.scales)}
        if self.scheme.weight == "fp8":
            scale = weight.global_scale if self.scheme.granularity == "tensor" else weight.scales
            return {"weight": weight.codes.view(E4M3), "weight_scale": field(scale)}
        if self.scheme.weight == "mxfp8":
            return {"weight": weight.codes.view(E4M3), "weight_scale": field(weight.scales)}
        stored = {"weight_packed": weight.codes, "weight_scale": field(weight.scales)}
        if self.scheme.weight == "nvfp4":
            divisor = _divisor(field(weight.global_scale))
            if divisor is None:
                raise FormatError(
                    "an NVFP4 global scale that is no reciprocal of a float32 cannot be stored exactly"
                )
            stored["weight_global_scale"] = divisor
        return stored

    def config(self, kept: Collection[str]) -> dict[str, Any]:
        s = self.scheme
        weights: dict[str, Any] = {
            "num_bits": s.bits,
            "type": "int" if s.is_integer else "float",
            "symmetric": s.symmetric,
            "dynamic": False,
            "strategy": s.granularity,
        }
        if s.granularity == "group":
            weights |= {
                "group_size": s.group_size,
                "strategy": "tensor_group" if s.weight == "nvfp4" else "group",
            }
        if s.granularity == "block":
            weights["block_structure"] = [BLOCK, BLOCK]
        if s.scale_dtype in ("e8m0", "e4m3"):
            weights["scale_dtype"] = "torch.uint8" if s.scale_dtype == "e8m0" else "torch.float8_e4m3fn"
        inputs = None
        if s.activation is not None:
            inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": inputs,
            "output_activations": None,
            "format": self.form,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": self.form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": sorted({"lm_head", *kept}),
            "kv_cache_scheme": None,
        }


def _divisor(multiplier: Tensor) -> Tensor | None:
    """A float32 whose float32 reciprocal is the multiplier, bit for bit, or None."""
    near = (1 / multiplier.double()).float()
    for step in (0, 1, -1):
        candidate = (near.view(torch.int32) + step).view(torch.float32)
        if torch.equal(1 / candidate, multiplier):
            return candidate
    return None


FORMAT = FormatSpec(
    "compressed-tensors", CompressedTensors, CompressedTensorsWriter, entry="compression_config"
)
