"""Codes of a weight in the operand order of 16-row matrix instructions: word by word, in torch; tiles in blocks of four.

A word of four bits a code has eight codes: index 4 * odd + 2 * column half + row half. A word of FP8 has four: 2 * odd + row half.
`FIELDS` says which bits of each go where in the 32-bit word.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gristmill.quant.layouts.w4_frag16_v1 import BLOCK_TILES, TILE_K, TILE_ROWS


class Field(NamedTuple):
    """`width` bits of code `code`, from bit `low` of it, lie from bit `place` of the word."""

    code: int
    low: int
    width: int
    place: int


def _int4() -> tuple[Field, ...]:
    return tuple(Field(4 * odd + i, 0, 4, 16 * odd + 4 * i) for odd in range(2) for i in range(4))


def _fp4() -> tuple[Field, ...]:
    """(low, width, place) of the even column; the odd one's is 16 bits further, around the word."""
    parts = (
        ((0, 3, 6), (3, 1, 15)),
        ((0, 3, 2), (3, 1, 11)),
        ((0, 3, 28), (3, 1, 5)),
        ((0, 1, 0), (1, 2, 25), (3, 1, 1)),
    )
    return tuple(
        Field(4 * odd + i, low, width, (place + 16 * odd) % 32)
        for odd in range(2)
        for i, fields in enumerate(parts)
        for low, width, place in fields
    )


def _fp8() -> tuple[Field, ...]:
    parts = (((0, 7, 4), (7, 1, 15)), ((0, 4, 0), (4, 3, 12), (7, 1, 11)))
    return tuple(
        Field(2 * odd + row, low, width, place + 16 * odd)
        for odd in range(2)
        for row, fields in enumerate(parts)
        for low, width, place in fields
    )


FIELDS = {"int4": _int4(), "fp4": _fp4(), "fp8": _fp8()}
CODE_BYTES = {"int4": 1024, "fp4": 1024, "int8": 2048, "fp8": 2048}
"""Of a tile, by the order of its codes; int8 is two tiles of int4: low nibbles, then high nibbles."""


def code_tiles(codes: Tensor, order: str) -> Tensor:
    """uint8 codes [16 T, 128 G], one per byte -> uint8 [T, G, bytes]."""
    if order == "int8":
        return torch.cat([code_tiles(codes & 15, "int4"), code_tiles(codes >> 4, "int4")], -1)
    tiles, groups = codes.shape[0] // TILE_ROWS, codes.shape[1] // TILE_K
    if (
        order == "fp8"
    ):  # row half, g | tile k: v, step, column half, t, odd -> v, g, t, step, column half | odd, row half
        split = codes.view(tiles, 2, 8, groups, 4, 2, 2, 4, 2).permute(0, 3, 4, 2, 7, 5, 6, 8, 1)
        per_word = split.reshape(tiles, groups, 512, 4)
    else:  # row half, g | tile k: h, w, column half, t, odd -> h, g, t, w | odd, column half, row half
        split = codes.view(tiles, 2, 8, groups, 2, 4, 2, 4, 2).permute(0, 3, 4, 2, 7, 5, 8, 6, 1)
        per_word = split.reshape(tiles, groups, 256, 8)
    words = torch.zeros(per_word.shape[:-1], dtype=torch.int64, device=codes.device)
    for field in FIELDS[order]:
        bits = per_word[..., field.code].to(torch.int64) >> field.low & (1 << field.width) - 1
        words |= bits << field.place
    octets: Tensor = words.view(torch.uint8).unflatten(-1, (-1, 8))
    return octets[..., :4].flatten(-2)


def codes_of_tiles(tiles: Tensor, order: str) -> Tensor:
    """Inverse of code_tiles: uint8 [16 T, 128 G]."""
    if order == "int8":
        low, high = (codes_of_tiles(part, "int4") for part in tiles.chunk(2, -1))
        return low | high << 4
    count, groups = tiles.shape[:2]
    words = tiles.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    made = torch.zeros(*words.shape, 4 if order == "fp8" else 8, dtype=torch.uint8, device=tiles.device)
    for field in FIELDS[order]:
        made[..., field.code] |= ((words >> field.place & (1 << field.width) - 1) << field.low).to(
            torch.uint8
        )
    if order == "fp8":
        rows = made.view(count, groups, 4, 8, 4, 2, 2, 2, 2).permute(0, 8, 3, 1, 2, 5, 6, 4, 7)
    else:
        rows = made.view(count, groups, 2, 8, 4, 4, 2, 2, 2).permute(0, 8, 3, 1, 2, 5, 7, 4, 6)
    return rows.reshape(count * TILE_ROWS, groups * TILE_K)


def block_views(stored: Tensor, count: int, groups: int, tile_bytes: int) -> list[tuple[slice, Tensor]]:
    """The tiles inside the stored bytes: (which tiles, a view [tiles, G, bytes]) of the whole blocks, and of the last one."""
    full = count // BLOCK_TILES * BLOCK_TILES
    cut = full * groups * tile_bytes
    views = []
    if full:
        views.append((slice(0, full), stored[:cut].view(-1, groups, BLOCK_TILES, tile_bytes).transpose(1, 2)))
    if count > full:
        views.append(
            (slice(full, count), stored[cut:].view(1, groups, count - full, tile_bytes).transpose(1, 2))
        )
    return views
