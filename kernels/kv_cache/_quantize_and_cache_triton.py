"""Paged cache writes in e4m3, in Triton: one program per token and a few heads, keys and values side by side in the grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase
from gristmill.kernels.dependent_launch import begin, overlap_on, overlapped
from gristmill.kernels.kv_cache._e4m3_triton import e4m3_encode
from gristmill.kernels.kv_cache.quantized import as_bytes, by_token, scale_strides
from gristmill.kernels.lazy_triton import function_of, jit, tl

if TYPE_CHECKING:
    from torch import Tensor


@jit
def quantize_rows(
    x,
    inside,
    head,
    cache,
    scale,
    slot,
    cache_block,
    cache_place,
    cache_head,
    scale_block,
    scale_place,
    scale_head,
    heads,
    block_size,
    BLOCK_D: tl.constexpr,
    TOKEN_SCALES: tl.constexpr,
):
    """Rows x float32 [BLOCK_H, BLOCK_D], 0 where not `inside`, of heads head [BLOCK_H], into the slot of the cache."""
    block = slot // block_size
    place = slot % block_size
    scale_at = scale + head.to(tl.int64) * scale_head
    if TOKEN_SCALES:
        scale_at += block * scale_block + place * scale_place
        # As integers magnitudes are in the same order, and NaN is the largest.
        amax = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
        row_scale = tl.div_rn(tl.where(amax < 1e-10, 1e-10, amax), tl.full(amax.shape, 448.0, tl.float32))
        tl.store(scale_at, row_scale, mask=head < heads)
    else:
        row_scale = tl.load(scale_at, mask=head < heads, other=1.0)
    offset = tl.arange(0, BLOCK_D)
    to = cache + block * cache_block + place * cache_place + head.to(tl.int64)[:, None] * cache_head
    codes = e4m3_encode(tl.div_rn(x, tl.broadcast_to(row_scale[:, None], x.shape)))
    tl.store(to + offset[None, :], codes, mask=inside)


@jit
def _quantize(
    source,
    cache,
    scale,
    token,
    slot,
    source_token,
    source_head,
    cache_block,
    cache_place,
    cache_head,
    scale_block,
    scale_place,
    scale_head,
    heads,
    block_size,
    SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TOKEN_SCALES: tl.constexpr,
):
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offset = tl.arange(0, BLOCK_D)
    inside = (head < heads)[:, None] & (offset < SIZE)[None, :]
    at = source + token * source_token + head.to(tl.int64)[:, None] * source_head + offset[None, :]
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    quantize_rows(
        x,
        inside,
        head,
        cache,
        scale,
        slot,
        cache_block,
        cache_place,
        cache_head,
        scale_block,
        scale_place,
        scale_head,
        heads,
        block_size,
        BLOCK_D,
        TOKEN_SCALES,
    )


@jit
def quantize_and_cache_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    k_scale,
    v_scale,
    key_token,
    key_head,
    value_token,
    value_head,
    key_block,
    key_place,
    key_cache_head,
    value_block,
    value_place,
    value_cache_head,
    k_scale_block,
    k_scale_place,
    k_scale_head,
    v_scale_block,
    v_scale_place,
    v_scale_head,
    heads,
    block_size,
    slots,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TOKEN_SCALES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if (slot >= 0) & (slot < slots):
        if tl.program_id(2) == 0:
            _quantize(
                key,
                key_cache,
                k_scale,
                token,
                slot,
                key_token,
                key_head,
                key_block,
                key_place,
                key_cache_head,
                k_scale_block,
                k_scale_place,
                k_scale_head,
                heads,
                block_size,
                D,
                BLOCK_H,
                BLOCK_D,
                TOKEN_SCALES,
            )
        else:
            _quantize(
                value,
                value_cache,
                v_scale,
                token,
                slot,
                value_token,
                value_head,
                value_block,
                value_place,
                value_cache_head,
                v_scale_block,
                v_scale_place,
                v_scale_head,
                heads,
                block_size,
                DV,
                BLOCK_H,
                BLOCK_D,
                TOKEN_SCALES,
            )


def launch_quantized(
    config: Config,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """The arguments of `reshape_and_cache.reference`, with scales."""
    tokens, heads, d = key.shape
    dv = value.shape[2]
    blocks, block_size = key_cache.shape[:2]
    if not tokens:
        return
    block_d = 1 << (max(d, dv) - 1).bit_length()
    block_h = min(1 << (heads - 1).bit_length(), max(1, int(config["block"]) // block_d))
    quantize_and_cache_kernel[(tokens, cdiv(heads, block_h), 2)](
        key,
        value,
        as_bytes(key_cache),
        as_bytes(value_cache),
        slot_mapping,
        k_scale,
        v_scale,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *scale_strides(k_scale),
        *scale_strides(v_scale),
        heads,
        block_size,
        blocks * block_size,
        D=d,
        DV=dv,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        TOKEN_SCALES=by_token(k_scale),
        num_warps=config["warps"],
        **overlapped(key),
    )


def quantized_cases(target: Target) -> list[AotCase]:
    """What the compile matrix builds: eight heads of 128 in bf16, both kinds of scales, block strides past 2³¹ elements."""
    kernel = quantize_and_cache_kernel
    pointers = {
        **dict.fromkeys(("key", "value"), "*bf16"),
        **dict.fromkeys(("key_cache", "value_cache"), "*u8"),
        **dict.fromkeys(("k_scale", "v_scale"), "*fp32"),
        "slot_mapping": "*i64",
    }
    int64_strides = ("key_block", "value_block")
    sizes = {
        name: "i64" if name in int64_strides else "i32"
        for name in function_of(kernel).arg_names
        if name.lower() == name
    }
    constants = {"D": 128, "DV": 128, "BLOCK_H": 8, "BLOCK_D": 128}
    return [
        AotCase(
            f"fp8_{name}",
            kernel,
            sizes | pointers,
            constants | {"TOKEN_SCALES": by_tokens} | overlap_on(target),
            {"num_warps": 4},
        )
        for name, by_tokens in (("head", False), ("token", True))
    ]
