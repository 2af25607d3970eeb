"""Paged cache writes in Triton: one program per token and block of its elements; with values, theirs follow the keys'."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def _copy(
    source,
    cache,
    token,
    slot,
    part,
    source_token,
    source_head,
    cache_block,
    cache_place,
    cache_head,
    heads,
    size: tl.constexpr,
    block_size,
    BLOCK: tl.constexpr,
):
    element = part * BLOCK + tl.arange(0, BLOCK)
    inside = element < heads * size
    head, offset = (element // size).to(tl.int64), element % size
    values = tl.load(source + token * source_token + head * source_head + offset, mask=inside)
    place = cache + (slot // block_size) * cache_block + (slot % block_size) * cache_place
    tl.store(place + head * cache_head + offset, values, mask=inside)


@triton.jit
def reshape_and_cache_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
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
    heads,
    block_size,
    slots,
    key_parts,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slot_mapping + token)
    if (slot >= 0) & (slot < slots):
        if part < key_parts:
            _copy(
                key,
                key_cache,
                token,
                slot,
                part,
                key_token,
                key_head,
                key_block,
                key_place,
                key_cache_head,
                heads,
                D,
                block_size,
                BLOCK,
            )
        else:
            _copy(
                value,
                value_cache,
                token,
                slot,
                part - key_parts,
                value_token,
                value_head,
                value_block,
                value_place,
                value_cache_head,
                heads,
                DV,
                block_size,
                BLOCK,
            )


@triton.jit
def reshape_and_cache_mla_kernel(
    latent,
    cache,
    slot_mapping,
    latent_token,
    cache_block,
    cache_place,
    block_size,
    slots,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if (slot >= 0) & (slot < slots):
        _copy(
            latent,
            cache,
            token,
            slot,
            tl.program_id(1),
            latent_token,
            0,
            cache_block,
            cache_place,
            0,
            1,
            D,
            block_size,
            BLOCK,
        )


def launch(
    config: Config, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """key [T, H, D], value [T, H, Dv] -> key_cache, value_cache [blocks, block_size, H, D or Dv] by slot_mapping [T]."""
    tokens, heads, d = key.shape
    dv, block = value.shape[2], int(config["block"])
    blocks, block_size = key_cache.shape[:2]
    key_parts, value_parts = cdiv(heads * d, block), cdiv(heads * dv, block)
    if tokens:
        reshape_and_cache_kernel[(tokens, key_parts + value_parts)](
            key,
            value,
            key_cache,
            value_cache,
            slot_mapping,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            heads,
            block_size,
            blocks * block_size,
            key_parts,
            D=d,
            DV=dv,
            BLOCK=block,
            num_warps=config["warps"],
        )


def launch_mla(config: Config, latent: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """latent [T, D] -> cache [blocks, block_size, D] by slot_mapping [T]."""
    (tokens, d), block = latent.shape, int(config["block"])
    blocks, block_size = cache.shape[:2]
    if tokens:
        reshape_and_cache_mla_kernel[(tokens, cdiv(d, block))](
            latent,
            cache,
            slot_mapping,
            latent.stride(0),
            cache.stride(0),
            cache.stride(1),
            block_size,
            blocks * block_size,
            D=d,
            BLOCK=block,
            num_warps=config["warps"],
        )


def aot(target: Target) -> list[AotCase]:
    """What the compile matrix builds: eight heads of 128 in bf16, block strides past 2³¹ elements."""
    pointers = dict.fromkeys(("key", "value", "key_cache", "value_cache"), "*bf16") | {"slot_mapping": "*i64"}
    names = (
        "key_token",
        "key_head",
        "value_token",
        "value_head",
        "key_block",
        "key_place",
        "key_cache_head",
        "value_block",
        "value_place",
        "value_cache_head",
        "heads",
        "block_size",
        "slots",
        "key_parts",
    )
    int64_names = ("key_block", "value_block")
    sizes = {name: "i64" if name in int64_names else "i32" for name in names}
    return [
        AotCase(
            "nhd",
            reshape_and_cache_kernel,
            pointers | sizes,
            {"D": 128, "DV": 128, "BLOCK": 1024},
            {"num_warps": 4},
        )
    ]


def aot_mla(target: Target) -> list[AotCase]:
    """What the compile matrix builds: DeepSeek's latent in bf16."""
    pointers = {"latent": "*bf16", "cache": "*bf16", "slot_mapping": "*i64"}
    sizes = dict.fromkeys(("latent_token", "cache_block", "cache_place", "block_size", "slots"), "i32")
    return [
        AotCase(
            "mla", reshape_and_cache_mla_kernel, pointers | sizes, {"D": 576, "BLOCK": 1024}, {"num_warps": 4}
        )
    ]
