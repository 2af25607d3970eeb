"""FP8 checkpoints with ``quant_method: fp8``: DeepSeek's 128 x 128 blocks, and one scale per tensor.

``NAME.weight`` float8_e4m3fn [N, K], and

- with ``weight_block_size: [128, 128]`` ``NAME.weight_scale_inv`` [ceil(N/128), ceil(K/128)], float32 or E8M0. It is a
  multiplier, whatever its name says: W = q * scale. The last blocks may be partial.
- without, ``NAME.weight_scale``, one number, and for ``activation_scheme: static`` ``NAME.input_scale``.

The dtype of a module's weight tells whether it is quantized: lists of exceptions (``modules_to_not_convert``, ``ignored_layers``)
are checked against it. Fused experts are [E, N, K] with scales in front. ``scale_fmt: ue8m0`` says that scales, stored
in float32, are powers of two, which changes how activations are rounded and nothing here. Weights in float8_e4m3fnuz (made
for gfx94x) become float8_e4m3fn of twice the value, and their scales half as large. Sources: DeepSeek-V3's
inference code (fp8_cast_bf16), transformers' FineGrainedFP8Config.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import BLOCK, QuantScheme
from gristmill.quant import numeric
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
    listed,
    make,
    need,
    new_codes,
    one_number,
)
from gristmill.quant.formats.writers import E4M3, SchemeWriter, field
from gristmill.quant.tensor import QuantTensor

BLOCK_SCALES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)


class DeepSeekFp8(Format):
    """A checkpoint of ``quant_method: fp8``."""

    name = "fp8"

    def __init__(self, config: Mapping[str, Any], where: str = "quantization_config") -> None:
        fields = Fields(config, where)
        fields.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        fields.one_of("scale_fmt", ("ue8m0", "float"), "float")
        self.static = fields.one_of("activation_scheme", ("dynamic", "static"), "dynamic") == "static"
        size = fields.get("weight_block_size", (list, tuple), None)
        if size is not None and list(size) != [BLOCK, BLOCK]:
            raise FormatError(
                f"{where}: weight_block_size {list(size)} is not read; known: [{BLOCK}, {BLOCK}] or none"
            )
        self.blocks = size is not None
        self.exceptions = fields.strings("modules_to_not_convert") + fields.strings("ignored_layers")

    def scheme_of(self, module: str) -> QuantScheme:
        """Blocks, or one scale per tensor."""
        return QuantScheme.parse("fp8_block" if self.blocks else "fp8")

    def read(
        self, source: Source, module: str, shape: tuple[int, ...], place: Place = new_codes
    ) -> StoredWeight | None:
        """The weight of a module, None where it is stored in floats."""
        name = f"{module}.weight"
        need(source, module, (".weight",), "FP8")
        if source.spec(name)[0] in FLOATS:
            return None
        codes = source.read(name, shape, dtypes=(torch.float8_e4m3fn, torch.float8_e4m3fnuz))
        if listed(module, self.exceptions):
            raise FormatError(f"{module} is listed as not converted, but {name} is {codes.dtype}")
        if not self.blocks:
            return self._per_tensor(source, module, shape, codes)
        need(source, module, (".weight_scale_inv",), "FP8 in 128 x 128 blocks")
        scheme = QuantScheme.parse("fp8_block")
        expected = (*shape[:-2], *(scheme.scale_shape(*shape[-2:]) or ()))
        scales = as_float32(source.read(f"{module}.weight_scale_inv", expected, dtypes=BLOCK_SCALES))
        stored, factor = _codes(name, codes)
        weight = make(module, stored, scales * factor, shape, scheme)
        return StoredWeight(weight, (name, f"{module}.weight_scale_inv"), "fp8_g128")

    def _per_tensor(self, source: Source, module: str, shape: tuple[int, ...], codes: Tensor) -> StoredWeight:
        names = [f"{module}.weight", f"{module}.weight_scale"]
        need(source, module, (".weight_scale",), "FP8 with one scale per tensor")
        scale = one_number(source, names[1])
        given = None
        if self.static:
            need(source, module, (".input_scale",), "FP8 with static activation scales")
            names.append(f"{module}.input_scale")
            given = one_number(source, names[2])
        stored, factor = _codes(names[0], codes)
        weight = make(module, stored, None, shape, "fp8", global_scale=scale * factor)
        return StoredWeight(weight, tuple(names), "fp8", given)


def _codes(name: str, codes: Tensor) -> tuple[Tensor, float]:
    """E4M3 bytes, and what their scales are to be multiplied by."""
    if codes.dtype != torch.float8_e4m3fnuz:
        return as_bytes(codes), 1.0
    try:
        return numeric.e4m3fnuz_to_fn(codes.contiguous().view(torch.uint8)), 0.5
    except ValueError as error:
        raise FormatError(f"tensor {name}: {error}") from error


class DeepSeekFp8Writer(SchemeWriter):
    """DeepSeek's FP8."""

    name = "fp8"

    def holds(self, scheme: QuantScheme) -> bool:
        return scheme.weights == "fp8_block" and scheme.activation in (None, "fp8_g128")

    def tensors(self, weight: QuantTensor) -> dict[str, Tensor]:
        return {"weight": weight.codes.view(E4M3), "weight_scale_inv": field(weight.scales)}

    def config(self, kept: Collection[str]) -> dict[str, Any]:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [BLOCK, BLOCK],
            "activation_scheme": "dynamic",
            "modules_to_not_convert": sorted({"lm_head", *kept}),
        }


FORMAT = FormatSpec("fp8", DeepSeekFp8, DeepSeekFp8Writer)
