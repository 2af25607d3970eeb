"""The same order of codes on a GPU, straight from a QuantTensor's bytes: one pass, each word gathered by the thread that writes it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gristmill.kernel_registry.scheme import cdiv

ORDERS = {"int4": 0, "fp4": 1, "int8": 2, "fp8": 3}


@triton.jit
def _spread_fp4(code, i: tl.constexpr):
    """A code's bits where the even column of pair i has them."""
    if i == 0:
        word = (code & 7) << 6 | (code >> 3) << 15
    elif i == 1:
        word = (code & 7) << 2 | (code >> 3) << 11
    elif i == 2:
        word = (code & 7) << 28 | (code >> 3) << 5
    else:
        word = (code & 1) | (code >> 1 & 3) << 25 | (code >> 3) << 1
    return word


@triton.jit
def _pair(low, high, i: tl.constexpr, FP4: tl.constexpr):
    """Codes of an even and an odd column as pair i of a word."""
    if FP4:
        odd = _spread_fp4(high, i)
        return _spread_fp4(low, i) | (odd << 16 | odd >> 16)
    return low << (4 * i) | high << (4 * i + 16)


@triton.jit
def _byte(codes, row, column, n, width, stride, pad: tl.constexpr):
    here = (row < n) & (column < width)
    return tl.load(codes + row.to(tl.int64) * stride + column, mask=here, other=pad).to(tl.uint32)


@triton.jit
def _pack(
    codes,
    out,
    n,
    k,
    width,
    stride,
    tiles,
    groups,
    TILE_WORDS: tl.constexpr,
    ORDER: tl.constexpr,
    PAD: tl.constexpr,
):
    """One tile of one group: codes [n, width] bytes of k columns -> words of `out`, in blocks of four tiles."""
    tile, group = tl.program_id(1), tl.program_id(0)
    block = tile // 4
    in_block = tl.minimum(4, tiles - block * 4)
    base = out + (block.to(tl.int64) * 4 * groups + group * in_block + tile % 4) * TILE_WORDS
    word = tl.arange(0, 256)
    lane = word >> 2 & 31
    row, t = tile * 16 + (lane >> 2), lane & 3
    if ORDER < 2:
        step = (word >> 7) * 4 + (word & 3)
        made = tl.zeros((256,), tl.uint32)
        for i in tl.static_range(4):
            column = group * 64 + step * 8 + (i // 2) * 4 + t
            byte = _byte(codes, row + 8 * (i % 2), column, n, width, stride, PAD * 17)
            odd = tl.where(column * 2 + 1 < k, byte >> 4, PAD)
            made |= _pair(byte & 15, odd, i, ORDER == 1)
        tl.store(base + word, made)
    elif ORDER == 2:
        step = (word >> 7) * 4 + (word & 3)
        low, high = tl.zeros((256,), tl.uint32), tl.zeros((256,), tl.uint32)
        for i in tl.static_range(4):
            column = group * 128 + step * 16 + (i // 2) * 8 + 2 * t
            even = _byte(codes, row + 8 * (i % 2), column, n, width, stride, PAD)
            odd = _byte(codes, row + 8 * (i % 2), column + 1, n, width, stride, PAD)
            low |= _pair(even & 15, odd & 15, i, False)
            high |= _pair(even >> 4, odd >> 4, i, False)
        tl.store(base + word, low)
        tl.store(base + 256 + word, high)
    else:
        for half in tl.static_range(2):
            at = half * 256 + word
            column = group * 128 + (at >> 7) * 32 + (at >> 1 & 1) * 16 + (at & 1) * 8 + 2 * t
            made = tl.zeros((256,), tl.uint32)
            for odd in tl.static_range(2):
                first = _byte(codes, row, column + odd, n, width, stride, PAD)
                second = _byte(codes, row + 8, column + odd, n, width, stride, PAD)
                made |= ((first & 127) << 4 | (first >> 7) << 15) << (16 * odd)
                made |= ((second & 15) | (second >> 4 & 7) << 12 | (second >> 7) << 11) << (16 * odd)
            tl.store(base + at, made)


def pack_codes(codes: Tensor, k: int, order: str, pad: int, out: Tensor, tile_bytes: int) -> None:
    """uint8 codes [N, bytes] of k columns, as a QuantTensor has them -> the code part of the tiles in `out` (uint8)."""
    n, width = codes.shape
    tiles, groups = cdiv(n, 16), cdiv(k, 128)
    with torch.cuda.device(codes.device):
        _pack[(groups, tiles)](
            codes,
            out.view(torch.int32),
            n,
            k,
            width,
            codes.stride(0),
            tiles,
            groups,
            TILE_WORDS=tile_bytes // 4,
            ORDER=ORDERS[order],
            PAD=pad,
            num_warps=4,
        )
