"""The error of keys that were rotated and written into a paged cache, as they are or as e4m3 codes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.problem import Problem
from gristmill.kernels.kv_cache import quantized
from gristmill.kernels.rope.rotary_embedding import distance

if TYPE_CHECKING:
    import torch


def error(
    problem: Problem,
    arguments: Sequence[Any],
    outputs: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
) -> float:
    """Largest error of q and of the written keys of `qk_norm_rope_cache`; infinite if anything else differs: values, their scales,
    unwritten slots, and without a norm the elements past the rotated part.

    |Δ| of an element is relative to the length of its pair, and past the rotated part to the element. The Δ of a key of codes is
    how far the unquantized key is from all values that round to the code. The scale of a token and head: |Δ| / √2, relative,
    because no pair is longer than √2 · amax.
    """
    import torch

    q, key_cache, value_cache, *scales = outputs
    q_ref, key_ref, value_ref, *scales_ref = references
    slots, block_size = arguments[8], key_cache.shape[1]
    place = slots[slots >= 0] // block_size, slots[slots >= 0] % block_size
    unwritten = torch.ones(key_cache.shape[:2], dtype=torch.bool, device=q.device)
    unwritten[place] = False
    copies = [(value_cache, value_ref), (key_cache[unwritten], key_ref[unwritten])]
    keys, keys_ref = key_cache[place], key_ref[place]
    if not problem["norm"]:
        rot = problem.integer("rot")
        copies.append((q[..., rot:], q_ref[..., rot:]))
        if not scales:
            copies.append((keys[..., rot:], keys_ref[..., rot:]))
    worst = distance(problem, q_ref, q.double() - q_ref.double())
    if not scales:
        delta = keys.double() - keys_ref.double()
    else:
        k_scale, k_scale_ref = scales[0].double(), scales_ref[0].double()
        copies.append((scales[1], scales_ref[1]))
        scale = k_scale[0]
        if quantized.by_token(k_scale):
            copies.append((k_scale[unwritten], k_scale_ref[unwritten]))
            scale = k_scale[place]
            worst = max([worst, *((scale / k_scale_ref[place] - 1).abs() / math.sqrt(2)).flatten().tolist()])
        keys_ref = _unquantized(arguments)[slots >= 0]
        delta = _outside(keys, keys_ref.double() / scale[..., None]) * scale[..., None]
    if not all(map(_equal, *zip(*copies, strict=True))):
        return math.inf
    return max(worst, distance(problem, keys_ref, delta))


def _unquantized(arguments: Sequence[Any]) -> torch.Tensor:
    """The keys [T, Hk, D] that are quantized."""
    from gristmill.kernels.kv_cache.qk_norm_rope_cache import rotated

    qkv, q_weight, k_weight, eps, positions, cos_sin, key_cache, _, _, interleaved, *_ = arguments
    heads = key_cache.shape[2]
    q, k, _ = qkv.split([qkv.shape[1] - 2 * heads, heads, heads], 1)
    return rotated(q, k, q_weight, k_weight, eps, positions, cos_sin, interleaved)[1]


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the bytes of two tensors are equal."""
    import torch

    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _outside(codes: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The distance of float64 values from the interval that rounds to their e4m3 codes."""
    import torch

    finite = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double().to(values.device)
    middle = (finite[1:] + finite[:-1]) / 2
    upper = torch.cat((middle, middle.new_full((1,), math.inf)))
    lower = torch.cat((-middle[:1], middle))  # the interval of 0 extends to both sides
    code = codes.contiguous().view(torch.uint8).long()
    magnitude = (code & 0x7F).clamp(max=0x7E)
    signed = torch.where(code >= 0x80, -values, values)
    return (lower[magnitude] - signed).clamp_min(0) + (signed - upper[magnitude]).clamp_min(0)
