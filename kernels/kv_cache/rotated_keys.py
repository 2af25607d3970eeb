"""Normalized and rotated queries and keys, and the error of such keys in a paged cache, as they are or as e4m3 codes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from gristmill.kernel_registry.problem import Problem
from gristmill.kernels.code_intervals import outside
from gristmill.kernels.kv_cache import quantized
from gristmill.kernels.norm import rms_norm
from gristmill.kernels.rope import rotary_embedding

if TYPE_CHECKING:
    from torch import Tensor

    Arguments: TypeAlias = tuple[
        Tensor,
        Tensor | None,
        Tensor | None,
        float,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        bool,
        Tensor | None,
        Tensor | None,
    ]


def rotated(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    interleaved: bool,
    kv_heads: int,
) -> list[Tensor]:
    """The heads of qkv [T, Hq + 2 Hk, D]: q and k normalized and rotated, and v as it is."""
    q, k, v = qkv.split([qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    q, k = (
        x.clone() if weight is None else rms_norm.reference(x, weight, eps)
        for x, weight in ((q, q_weight), (k, k_weight))
    )
    rotary_embedding.reference(q, k, positions, cos_sin, interleaved)
    return [q, k, v]


def error(
    problem: Problem,
    arguments: Arguments,
    outputs: Sequence[Tensor],
    references: Sequence[Tensor],
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
    worst = rotary_embedding.distance(problem, q_ref, q.double() - q_ref.double())
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
        keys_ref = rotated(*arguments[:6], arguments[9], key_cache.shape[2])[1][slots >= 0]
        delta = outside(keys, keys_ref.double() / scale[..., None]) * scale[..., None]
    if not all(map(_equal, *zip(*copies, strict=True))):
        return math.inf
    return max(worst, rotary_embedding.distance(problem, keys_ref, delta))


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether the bytes of two tensors are equal."""
    import torch

    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
