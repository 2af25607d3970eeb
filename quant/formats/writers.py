"""From QuantTensors to the tensors and configurations of checkpoint formats: what the readers of this folder read.

======================  ======================================================  =====================================
format                  schemes                                                 as
======================  ======================================================  =====================================
gristmill               every one                                               its own fields
compressed-tensors      int1 to int8, group or channel, with or without zeros   pack-quantized
                        int8_ch.int8_token                                      int-quantized
                        fp8, fp8_ch, fp8_block                                  float-quantized
                        nvfp4, mxfp4, mxfp8                                     nvfp4-, mxfp4-pack-quantized, mxfp8-quantized
modelopt                nvfp4, mxfp4, mxfp8, fp8_ch                             W4A16_NVFP4, MXFP4, MXFP8, FP8_PER_CHANNEL_...
gptq                    int2, int3, int4, int8, group or channel                version 2 (``gptq_v2``)
fp8                     fp8_block                                               DeepSeek's 128 x 128 blocks
mxfp4                   mxfp4                                                   gpt-oss' experts, all of a layer in one tensor
======================  ======================================================  =====================================

What a format cannot hold exactly is a `FormatError` before anything is written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import BLOCK, QuantScheme
from gristmill.quant import numeric
from gristmill.quant.formats import words
from gristmill.quant.formats.contract import FormatError
from gristmill.quant.formats.gptq import BITS as GPTQ_BITS
from gristmill.quant.rtn import quantize
from gristmill.quant.tensor import QuantTensor

E4M3 = torch.float8_e4m3fn


class Writer(Protocol):
    """A format to write in one scheme.

    stacked: it holds experts [E, N, K] in one tensor, and no other weights; the others hold matrices alone.
    """

    name: str
    stacked: bool

    def quantize(self, weight: Tensor) -> QuantTensor:
        """A weight rounded to nearest, such that the format holds the result exactly."""
        ...

    def tensors(self, weight: QuantTensor) -> dict[str, Tensor]:
        """Suffix (`stored_name`) -> what is stored in place of ``NAME.weight``, of stacked experts in place of ``NAME``."""
        ...

    def config(self, kept: Collection[str]) -> dict[str, Any]:
        """``quantization_config``; kept: the modules with matrices that stay in floats."""
        ...


class _Base(ABC):
    """What writers share: a scheme, checked when the writer is made."""

    name = ""
    stacked = False

    def __init__(self, scheme: QuantScheme | str) -> None:
        self.scheme = QuantScheme.parse(scheme)
        if not self.holds(self.scheme):
            raise FormatError(
                f"{self.name} checkpoints do not hold {self.scheme}; see gristmill.quant.formats.writers"
            )

    @abstractmethod
    def holds(self, scheme: QuantScheme) -> bool:
        """Whether the format has a form for weights of `scheme`."""

    def quantize(self, weight: Tensor) -> QuantTensor:
        return quantize(weight, self.scheme)


class GristmillWriter(_Base):
    """gristmill's own fields."""

    name = "gristmill"

    def holds(self, scheme: QuantScheme) -> bool:
        return not scheme.is_dense

    def tensors(self, weight: QuantTensor) -> dict[str, Tensor]:
        return weight.tensors()

    def config(self, kept: Collection[str]) -> dict[str, Any]:
        return {"quant_method": "gristmill", "version": 1, "scheme": str(self.scheme)}


class CompressedTensorsWriter(_Base):
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
        """NVFP4's global scale is stored as its reciprocal: it is moved by a last bit to where that is exact."""
        q = quantize(weight, self.scheme)
        if self.scheme.weight != "nvfp4" or q.global_scale is None or _divisor(q.global_scale) is not None:
            return q
        return quantize(weight, self.scheme, global_scale=1 / (1 / q.global_scale))

    def tensors(self, weight: QuantTensor) -> dict[str, Tensor]:
        bits, n, k = self.scheme.bits, weight.n, weight.k
        if self.form == "pack-quantized":
            stored = {
                "weight_packed": words.to_words(weight.codes, -(-k * bits // 32)),
                "weight_scale": _field(weight.scales),
                "weight_shape": torch.tensor([n, k], dtype=torch.int64),
            }
            if weight.zero is not None:
                along_n = numeric.pack_bits(_codes(weight.zero, bits).t().contiguous(), bits)
                stored["weight_zero_point"] = words.to_words(along_n, -(-n * bits // 32)).t().contiguous()
            if weight.g_idx is not None:
                stored["weight_g_idx"] = weight.g_idx
            return stored
        if self.form == "int-quantized":
            return {"weight": (weight.codes ^ 0x80).view(torch.int8), "weight_scale": _field(weight.scales)}
        if self.scheme.weight == "fp8":
            scale = weight.global_scale if self.scheme.granularity == "tensor" else weight.scales
            return {"weight": weight.codes.view(E4M3), "weight_scale": _field(scale)}
        if self.scheme.weight == "mxfp8":
            return {"weight": weight.codes.view(E4M3), "weight_scale": _field(weight.scales)}
        stored = {"weight_packed": weight.codes, "weight_scale": _field(weight.scales)}
        if self.scheme.weight == "nvfp4":
            divisor = _divisor(_field(weight.global_scale))
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


class ModelOptWriter(_Base):
    """NVIDIA ModelOpt, weight-only where it has a name for that."""

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
        scales = _field(weight.scales)
        stored = {
            "weight": weight.codes if self.scheme.bits == 4 else weight.codes.view(E4M3),
            "weight_scale": scales[:, 0].contiguous() if self.scheme.granularity == "channel" else scales,
        }
        if weight.global_scale is not None:
            stored["weight_scale_2"] = weight.global_scale.reshape(())
        return stored

    def config(self, kept: Collection[str]) -> dict[str, Any]:
        found: dict[str, Any] = {
            "quant_method": "modelopt",
            "quant_algo": self.ALGORITHMS[str(self.scheme)],
            "exclude_modules": sorted({"lm_head", *kept}),
        }
        return found | ({"group_size": self.scheme.group_size} if self.scheme.granularity == "group" else {})


class GptqWriter(_Base):
    """GPTQ version 2."""

    name = "gptq"

    def holds(self, scheme: QuantScheme) -> bool:
        return (
            scheme.is_integer
            and scheme.bits in GPTQ_BITS
            and not scheme.minimums
            and scheme.activation is None
        )

    def tensors(self, weight: QuantTensor) -> dict[str, Tensor]:
        bits, n, k = self.scheme.bits, weight.n, weight.k
        if n * bits % 32 or k * bits % 32:
            raise FormatError(
                f"GPTQ packs {bits}-bit rows and columns into whole int32 words, which [{n}, {k}] does not fill"
            )
        scales = _field(weight.scales)
        half = scales.to(torch.float16)
        zero = (
            torch.full(scales.shape, 1 << (bits - 1), dtype=torch.uint8)
            if weight.zero is None
            else _codes(weight.zero, bits)
        )
        return {
            "qweight": words.to_words(weight.codes, k * bits // 32).t().contiguous(),
            "qzeros": words.to_words(numeric.pack_bits(zero.t().contiguous(), bits), n * bits // 32),
            # other readers expect float16: what it does not hold exactly stays as it is
            "scales": (half if torch.equal(half.to(scales.dtype), scales) else scales).t().contiguous(),
            "g_idx": weight.column_groups().clone(),
        }

    def config(self, kept: Collection[str]) -> dict[str, Any]:
        return {
            "quant_method": "gptq",
            "bits": self.scheme.bits,
            "group_size": self.scheme.group_size or -1,
            "desc_act": False,
            "sym": self.scheme.symmetric,
            "lm_head": False,
            "checkpoint_format": "gptq_v2",
        }


class DeepSeekFp8Writer(_Base):
    """DeepSeek's FP8."""

    name = "fp8"

    def holds(self, scheme: QuantScheme) -> bool:
        return scheme.weights == "fp8_block" and scheme.activation in (None, "fp8_g128")

    def tensors(self, weight: QuantTensor) -> dict[str, Tensor]:
        return {"weight": weight.codes.view(E4M3), "weight_scale_inv": _field(weight.scales)}

    def config(self, kept: Collection[str]) -> dict[str, Any]:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [BLOCK, BLOCK],
            "activation_scheme": "dynamic",
            "modules_to_not_convert": sorted({"lm_head", *kept}),
        }


class Mxfp4Writer(_Base):
    """gpt-oss: blocks of experts; attention, router, embedding and logits head stay in floats."""

    name = "mxfp4"
    stacked = True

    def holds(self, scheme: QuantScheme) -> bool:
        return str(scheme) == "mxfp4"

    def tensors(self, weight: QuantTensor) -> dict[str, Tensor]:
        return {"_blocks": weight.codes.unflatten(-1, (-1, 16)), "_scales": _field(weight.scales)}

    def config(self, kept: Collection[str]) -> dict[str, Any]:
        return {
            "quant_method": "mxfp4",
            "modules_to_not_convert": sorted({"lm_head", "model.embed_tokens", *kept}),
        }


WRITERS: Mapping[str, Callable[[QuantScheme | str], Writer]] = {
    writer.name: writer
    for writer in (
        GristmillWriter,
        CompressedTensorsWriter,
        ModelOptWriter,
        GptqWriter,
        DeepSeekFp8Writer,
        Mxfp4Writer,
    )
}
"""``quant_method`` -> writer."""


def open_writer(form: str, scheme: QuantScheme | str) -> Writer:
    """The writer of a format in a scheme; FormatError for an unknown format, or a scheme that it does not hold."""
    if form not in WRITERS:
        raise FormatError(f"no format {form!r} to write; known: {', '.join(WRITERS)}")
    return WRITERS[form](scheme)


def stored_name(module: str, suffix: str) -> str:
    """The tensor of a module: ``NAME.scales``, and of stacked experts ``NAME_scales``."""
    return f"{module}{suffix}" if suffix.startswith("_") else f"{module}.{suffix}"


def _field(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise FormatError("a quantized weight lacks the scales of its scheme")
    return tensor.contiguous()


def _codes(zero: Tensor, bits: int) -> Tensor:
    """Zero points as codes of the width; FormatError where they are none (offsets of GGUF, 2**bits)."""
    if zero.dtype != torch.uint8 or int(zero.max()) >= 1 << bits:
        raise FormatError(
            f"zero points must be integers below {1 << bits} to be packed, got {zero.dtype} up to {float(zero.max())}"
        )
    return zero


def _divisor(multiplier: Tensor) -> Tensor | None:
    """A float32 whose float32 reciprocal is the multiplier, bit for bit, or None."""
    near = (1 / multiplier.double()).float()
    for step in (0, 1, -1):
        candidate = (near.view(torch.int32) + step).view(torch.float32)
        if torch.equal(1 / candidate, multiplier):
            return candidate
    return None
