"""Packing of humming_v1 by humming itself, and unpacking by tracing each bit through humming's packing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gristmill.quant import numeric
from gristmill.quant.layouts._common import empty
from gristmill.quant.packed import Packed
from gristmill.quant.tensor import QuantTensor

WEIGHTS: dict[str, dict[str, Any]] = {
    **{f"int4_g{g}": {"dtype": "int4", "group_size": g} for g in (32, 64, 128)},
    **{f"int4_g{g}_zp": {"dtype": "int4", "group_size": g, "has_zero_point": True} for g in (32, 64, 128)},
    "mxfp4": {"dtype": "float4e2m1", "group_size": 32, "scale_dtype": "float8e8m0"},
    "nvfp4": {"dtype": "float4e2m1", "group_size": 16, "scale_dtype": "float8e4m3", "scale_2_type": "tensor"},
    "fp8": {"dtype": "float8e4m3", "scale_type": "tensor"},
    "fp8_block": {"dtype": "float8e4m3", "group_size": 128, "group_size_n": 128},
}
"""Weight configurations of humming, by scheme. Without fp8_ch: humming stores its scales in bf16."""
NAMES = {
    "weight": "weight",
    "scales": "weight_scale",
    "zeros": "zero_point",
    "global_scale": "weight_scale_2",
}
"""Slot of the layout -> humming's name."""


def pack(weight: QuantTensor) -> Packed:
    """A weight on a CUDA device, for bf16 activations. ValueError for a weight that humming cannot hold."""
    if weight.device.type != "cuda":
        raise ValueError(f"humming_v1 is made on a CUDA device, the weight is on {weight.device}")
    return by_library(weight)


def by_library(weight: QuantTensor) -> Packed:
    """A weight packed by humming."""
    name = weight.scheme.weights
    if weight.g_idx is not None or weight.n_idx is not None or len(weight.segments) != 1 or weight.lead:
        raise ValueError(
            f"humming packs one [N, K] matrix without act-order, segments or cut blocks, got {weight}"
        )
    if weight.scheme.is_integer and (weight.scales is None or weight.scales.dtype != torch.bfloat16):
        raise ValueError("humming's integer scales must be bfloat16 for bfloat16 activations")
    step = max(128, weight.scheme.group_size or 0)
    if weight.n % 128 or weight.k % step:
        raise ValueError(f"humming needs N a multiple of 128 and K of {step}, got N={weight.n}, K={weight.k}")
    from humming.layer import HummingLayer

    with torch.cuda.device_of(weight.codes):
        layer = HummingLayer(weight.n, weight.k, dict(WEIGHTS[name]), torch_dtype=torch.bfloat16).to(
            weight.device
        )
        layer.load_from_tensors(_sources(weight))
        layer.transform()
    slots = {}
    for slot, humming_name in NAMES.items():
        humming_tensor = getattr(layer, humming_name, None)
        slots[slot] = empty(torch.uint8, weight.device) if humming_tensor is None else humming_tensor.detach()
    slots["config"] = torch.frombuffer(bytearray(layer.humming_config.to_str().encode()), dtype=torch.uint8)
    return Packed("humming_v1", weight.scheme, weight.shape, slots, weight.segments)


def unpack(packed: Packed) -> QuantTensor:
    """Inverse of pack. It packs about 30 weights of the shape, and addresses of all bits have to fit in memory."""
    from humming.config import LayerConfig
    from humming.transform import transform_humming_tensors

    scheme, (n, k), slots = packed.scheme, packed.shape, packed.slots
    device = slots["weight"].device
    config = LayerConfig(**_layer(slots["config"]))
    plain = {name: _zeros(shape, dtype, device) for name, (shape, dtype) in _shapes(packed).items()}

    def restored(slot: str) -> Tensor:
        humming_name = NAMES[slot]

        def transform(source: Tensor) -> Tensor:
            with torch.cuda.device_of(source):
                transformed: Tensor = transform_humming_tensors(config, {**plain, humming_name: source})[
                    humming_name
                ]
            return transformed

        return _moved_back(slots[slot], plain[humming_name], transform)

    codes = restored("weight").view(torch.uint8).view(n, -1)
    if scheme.is_integer and "float" in str(_layer(slots["config"])["b_dtype"]):
        signed = numeric.unpack_bits(codes, 4, k).to(torch.int16)  # sign and magnitude
        codes = numeric.pack_bits((8 + torch.where(signed > 7, 8 - signed, signed)).to(torch.uint8), 4)
    scales = restored("scales")
    if scheme.granularity == "tensor":
        return QuantTensor(codes, None, packed.shape, scheme, None, scales, packed.segments)
    zero = None
    if slots["zeros"].numel():
        words = restored("zeros")
        zero = torch.stack([words >> 4 * i & 15 for i in range(8)], 1).flatten(0, 1).to(torch.uint8)
    scales = scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales
    global_scale = slots["global_scale"] if scheme.has_global else None
    return QuantTensor(codes, scales, packed.shape, scheme, zero, global_scale, packed.segments)


def _layer(config: Tensor) -> dict[str, Any]:
    layer: dict[str, Any] = json.loads(config.cpu().numpy().tobytes())
    layer.pop("sublayer_name", None)
    return layer


def _sources(weight: QuantTensor) -> dict[str, Tensor]:
    """The tensors that humming packs, by its names."""
    tensors = {"weight": weight.codes.contiguous().view(torch.int32)}
    if weight.scheme.granularity == "tensor":
        tensors["weight_scale"] = weight.global_scale  # type: ignore[assignment]
    else:
        scales = weight.scales.contiguous()  # type: ignore[union-attr]
        tensors["weight_scale"] = scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
    if weight.scheme.weight == "nvfp4":
        tensors["weight_scale_2"] = weight.global_scale  # type: ignore[assignment]
    if weight.zero is not None:
        tensors["zero_point"] = packed_zeros(weight.zero)
    return tensors


def _shapes(packed: Packed) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of what `_sources` gives for such a weight."""
    scheme, (n, k), slots = packed.scheme, packed.shape, packed.slots
    groups, scales = max(1, scheme.groups(k)), slots["scales"]
    if scheme.granularity == "tensor":
        scale_shape: tuple[int, ...] = tuple(scales.shape)
    else:
        scale_shape = (n // 128 if scheme.granularity == "block" else n, groups)
    shapes = {
        "weight": ((n, k * scheme.bits // 32), torch.int32),
        "weight_scale": (scale_shape, scales.dtype),
    }
    if slots["zeros"].numel():
        shapes["zero_point"] = ((n // 8, groups), torch.int32)
    if slots["global_scale"].numel():
        shapes["weight_scale_2"] = (tuple(slots["global_scale"].shape), slots["global_scale"].dtype)
    return shapes


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Bytes of 0, whatever the dtype has of numbers."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.zeros(size, dtype=torch.uint8, device=device).view(dtype).view(shape)


def _moved_back(last_output: Tensor, like: Tensor, ask: Callable[[Tensor], Tensor]) -> Tensor:
    """What became `made` under `ask`, which moves the bits of a tensor such as `like`, and may turn some of them over.

    ValueError if it does anything else.
    """
    count = like.nbytes * 8
    address = torch.arange(count, device=like.device)
    turned = _bits(ask(_tensor(torch.zeros(count, dtype=torch.uint8, device=like.device), like)))
    origin = torch.zeros_like(address)
    for digit in range(max(1, (count - 1).bit_length())):
        origin |= (_bits(ask(_tensor((address >> digit & 1).to(torch.uint8), like))) ^ turned).long() << digit
    if origin.numel() != count or not torch.equal(origin.sort().values, address):
        raise ValueError("humming_v1: humming does more than move bits here, so that nothing unpacks it")
    restored_bits = torch.empty(count, dtype=torch.uint8, device=like.device)
    restored_bits[origin] = _bits(last_output) ^ turned
    return _tensor(restored_bits, like)


def _bits(tensor: Tensor) -> Tensor:
    """Bits of a tensor's bytes, the lowest first, one per byte."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return (flat[:, None] >> torch.arange(8, dtype=torch.uint8, device=flat.device) & 1).flatten()


def _tensor(bits: Tensor, like: Tensor) -> Tensor:
    """Inverse of `_bits`, as a tensor such as `like`."""
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.view(-1, 8) * weights).sum(1, dtype=torch.uint8).view(like.dtype).view(like.shape)


def packed_zeros(zero: Tensor) -> Tensor:
    """uint8 [N, G] zero points below 16 -> int32 [N / 8, G], eight rows per word."""
    if zero.dtype != torch.uint8 or int(zero.max()) > 15 or zero.shape[0] % 8:
        raise ValueError(
            "humming's zero points must be integers 0..15 and N a multiple of 8, "
            f"got {zero.dtype} {tuple(zero.shape)}"
        )
    words = torch.zeros(zero.shape[0] // 8, zero.shape[1], dtype=torch.int64, device=zero.device)
    for i in range(8):
        words |= zero[i::8].long() << (4 * i)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
