"""gpt-oss checkpoints, ``quant_method: mxfp4``: expert weights in blocks of 32.

``NAME_blocks`` uint8 [E, N, K/32, 16], low nibble = even k, and ``NAME_scales`` uint8 [E, N, K/32], E8M0: W = e2m1 *
2^(scale - 127). Only experts are quantized, and NAME is the fused parameter ``...mlp.experts.gate_up_proj`` or
``...down_proj``. Rows of gate_up_proj are interleaved, gate and up alternating, and are left so: `deinterleaved` parts them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant.formats.contract import (
    Fields,
    Format,
    FormatError,
    FormatSpec,
    Place,
    Source,
    StoredWeight,
    make,
    need,
    new_codes,
)
from gristmill.quant.formats.writers import SchemeWriter, field
from gristmill.quant.tensor import QuantTensor


class Mxfp4(Format):
    """A checkpoint of ``quant_method: mxfp4``."""

    name = "mxfp4"

    def __init__(self, config: Mapping[str, Any], where: str = "quantization_config") -> None:
        self.exceptions = Fields(config, where).strings("modules_to_not_convert")

    def scheme_of(self, module: str) -> QuantScheme | None:
        """MXFP4 for experts, and none for anything else."""
        return QuantScheme.parse("mxfp4") if ".experts." in module else None

    def read(
        self, source: Source, module: str, shape: tuple[int, ...], place: Place = new_codes
    ) -> StoredWeight | None:
        """The weight of a module [..., N, K], None where it is stored in floats."""
        if f"{module}_blocks" not in source and f"{module}_scales" not in source:
            return None
        need(source, module, ("_blocks", "_scales"), "MXFP4 blocks and scales")
        k = shape[-1]
        if k % 32:
            raise FormatError(f"{module}: MXFP4 has blocks of 32 along K, and K is {k}")
        blocks = source.read(f"{module}_blocks", (*shape[:-1], k // 32, 16), dtypes=(torch.uint8,))
        scales = source.read(f"{module}_scales", (*shape[:-1], k // 32), dtypes=(torch.uint8,))
        weight = make(module, blocks.flatten(-2), scales, shape, QuantScheme.parse("mxfp4"))
        return StoredWeight(weight, (f"{module}_blocks", f"{module}_scales"))


class Mxfp4Writer(SchemeWriter):
    """gpt-oss: blocks of experts; attention, router, embedding and logits head stay in floats."""

    name = "mxfp4"
    stacked = True

    def holds(self, scheme: QuantScheme) -> bool:
        return str(scheme) == "mxfp4"

    def tensors(self, weight: QuantTensor) -> dict[str, Tensor]:
        return {"_blocks": weight.codes.unflatten(-1, (-1, 16)), "_scales": field(weight.scales)}

    def config(self, kept: Collection[str]) -> dict[str, Any]:
        return {
            "quant_method": "mxfp4",
            "modules_to_not_convert": sorted({"lm_head", "model.embed_tokens", *kept}),
        }


FORMAT = FormatSpec("mxfp4", Mxfp4, Mxfp4Writer)
