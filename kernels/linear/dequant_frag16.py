"""Linear over frag16 tiles for any number of rows: a Triton kernel dequantizes a chunk of the weight, torch multiplies.

Serves the buckets of a plan that the decode kernels do not: with many rows of x the product is compute-bound.
The weight is rounded once to the dtype of the activations, bf16 or fp16. A program dequantizes a tile of 16 rows x 128 columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase
from gristmill.kernels.lazy_triton import jit, tl
from gristmill.quant.layouts.w4_frag16_v1 import groups_per_tile, tile_bytes

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearCall

TILES = ("w4_frag16_v1", "f4_frag16_v1", "w8_frag16_v1")


def accepts(problem: Problem) -> str | None:
    """Weight-only formats that a frag16 layout holds."""
    scheme = QuantScheme.parse(problem.text("w"))
    held = any(default_registry().layout(name).accepts(scheme) for name in TILES)
    return None if held and scheme.activation is None else f"dequantizes what frag16 tiles hold, not {scheme}"


def config(problem: Problem, target: Target) -> Config:
    """The scheme, which cannot be derived from packed tensors."""
    return {"scheme": problem.text("w")}


INT4, FP4, INT8, FP8 = range(4)
CHUNK = 1 << 24
"""Weights dequantized at a time: 32 MB of bf16, which an L2 of 50 MB still holds when the product reads them."""


@jit
def _e2m1(word, i: tl.constexpr):
    """Pair i's code of the column whose bits start the word, as twice its value."""
    if i == 0:
        magnitude, sign = word >> 6 & 7, word >> 15 & 1
    elif i == 1:
        magnitude, sign = word >> 2 & 7, word >> 11 & 1
    elif i == 2:
        magnitude, sign = word >> 28 & 7, word >> 5 & 1
    else:
        magnitude, sign = (word & 1) | (word >> 25 & 3) << 1, word >> 1 & 1
    shift = tl.maximum(magnitude >> 1, 1) - 1
    twice = tl.where(magnitude < 2, magnitude, (2 + (magnitude & 1)) << shift).to(tl.float32)
    return tl.where(sign == 1, -twice, twice)


@jit
def _e4m3(code):
    """float32 of E4M3 codes."""
    exponent, mantissa = code >> 3 & 15, code & 7
    normal = ((exponent + 120) << 23 | mantissa << 20).to(tl.float32, bitcast=True)
    value = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)
    return tl.where(code >> 7 == 1, -value, value)


@jit
def _scale(
    scales, octets, words, g, half: tl.constexpr, j, P: tl.constexpr, ORDER: tl.constexpr, NVFP4: tl.constexpr
):
    """float32 scales of rows g + 8 half and groups j of the tile that starts at word `words`."""
    if ORDER == 1:
        byte = tl.load(octets + words * 4 + 1024 + 2 * P * g + 4 * (j // 2) + 2 * half + j % 2).to(tl.uint32)
        if NVFP4:
            value = ((byte >> 3) + 106 << 23 | (byte & 7) << 20).to(tl.float32, bitcast=True)
            value = tl.where(byte == 0, 0.0, value) * 0.5  # codes are decoded to twice their value
        else:
            value = (tl.maximum(byte, 128) - 128 << 23).to(
                tl.float32, bitcast=True
            )  # 2^(byte - 255), halved for the same reason
    elif ORDER == 3:
        value = tl.load(scales + words + 512 + 2 * g + half)
    else:
        start = words * 2 + (1024 if ORDER == 2 else 512)
        value = tl.load(scales + start + 2 * P * g + 2 * j + half).to(tl.float32)
    return value


@jit
def dequantize(
    words_ptr,
    scales,
    octets,
    row_scale,
    out,
    n,
    tiles,
    groups,
    first,
    TILE_WORDS: tl.constexpr,
    P: tl.constexpr,
    ORDER: tl.constexpr,
    ZERO: tl.constexpr,
    NVFP4: tl.constexpr,
    ROW_UNIT: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Tiles from `first` on -> out [rows, 128 * groups]. `scales` and `octets` are the same memory, in the scales' dtype and as bytes."""
    tile, group = first + tl.program_id(1), tl.program_id(0)
    block = tile // 4
    in_block = tl.minimum(4, tiles - block * 4)
    base = (block.to(tl.int64) * 4 * groups + group * in_block + tile % 4) * TILE_WORDS
    index = tl.arange(0, 256)
    pair = tl.arange(0, 2)[None, :]
    for part in tl.static_range(2 if ORDER == 3 else 1):
        at = index + 256 * part
        word = tl.load(words_ptr + base + at)
        high = word
        if ORDER == 2:
            high = tl.load(words_ptr + base + 256 + at)
        lane = at >> 2 & 31
        g, t = lane >> 2, lane & 3
        for i in tl.static_range(2 if ORDER == 3 else 4):
            if ORDER == 3:
                column = (at >> 7) * 32 + (at >> 1 & 1) * 16 + (at & 1) * 8 + 2 * t
                if i == 0:
                    even, odd = word >> 4 & 127 | (word >> 15 & 1) << 7, word >> 20 & 127 | (word >> 31) << 7
                else:
                    even = word & 15 | (word >> 12 & 7) << 4 | (word >> 11 & 1) << 7
                    odd = word >> 16 & 15 | (word >> 28 & 7) << 4 | (word >> 27 & 1) << 7
                left, right = _e4m3(even), _e4m3(odd)
            else:
                column = ((at >> 7) * 4 + (at & 3)) * 16 + (i // 2) * 8 + 2 * t
                if ORDER == 1:
                    left, right = _e2m1(word, i), _e2m1(word >> 16 | word << 16, i)
                else:
                    even, odd = word >> (4 * i) & 15, word >> (4 * i + 16) & 15
                    if ORDER == 2:
                        even, odd = even | (high >> (4 * i) & 15) << 4, odd | (high >> (4 * i + 16) & 15) << 4
                    left, right = even.to(tl.int32).to(tl.float32), odd.to(tl.int32).to(tl.float32)
            j = column * P // 128
            if ORDER == 0 or ORDER == 2:
                if ZERO:
                    zero = tl.load(octets + base * 4 + 1024 + 32 * P + 2 * P * g + 2 * j + i % 2).to(
                        tl.float32
                    )
                    left, right = left - zero, right - zero
                else:
                    left, right = left - (128 if ORDER == 2 else 8), right - (128 if ORDER == 2 else 8)
            scale = _scale(scales, octets, base, g, i % 2, j, P, ORDER, NVFP4)
            left, right = left * scale, right * scale
            row = tile * 16 + g + 8 * (i % 2)
            if ORDER == 1:
                factor = tl.load(row_scale + row, mask=row < n, other=0.0) * ROW_UNIT
                left, right = left * factor, right * factor
            to = out + (row - first * 16).to(tl.int64) * (groups * 128) + group * 128 + column
            tl.store(to[:, None] + pair, tl.join(left, right).to(TYPE), mask=(row < n)[:, None])


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K] and the three tensors of a frag16 layout -> out [..., N or N / 2]: rows of W at a time, then torch's product."""
    import torch

    from gristmill.kernels._packed_rows import gather
    from gristmill.kernels.linear._epilogue import finish

    tiles, second, perm = call.weight
    scheme, rows = QuantScheme.parse(str(config["scheme"])), call.out.shape[-1] * (2 if call.silu_mul else 1)
    flat = gather(call.x.reshape(-1, call.x.shape[-1]), perm if perm.numel() else None)
    k = flat.shape[1]
    size, count, groups = tile_bytes(scheme), cdiv(rows, 16), cdiv(k, 128)
    if tiles.numel() != count * groups * size:
        raise ValueError(
            f"linear of {scheme}: {tiles.numel()} bytes of tiles do not pack a [{rows}, {k}] weight; expected "
            f"{count * groups * size}"
        )
    plain = call.bias is None and call.residual is None and not call.silu_mul
    z = (
        call.out.view(-1, rows)
        if plain
        else torch.empty(flat.shape[0], rows, dtype=call.x.dtype, device=call.x.device)
    )
    step = max(1, CHUNK // (groups * 128 * 64)) * 4
    dense = torch.empty(min(step, count) * 16, groups * 128, dtype=call.x.dtype, device=call.x.device)
    order = (INT4 if scheme.is_integer else FP4) if scheme.bits == 4 else INT8 if scheme.is_integer else FP8
    scales = tiles if order == FP4 else tiles.view(second.dtype)
    dtype = getattr(tl, str(call.x.dtype).removeprefix("torch."))
    for first in range(0, count, step):
        tile_rows = min(step, count - first)
        dequantize[(groups, tile_rows)](
            tiles.view(torch.int32).view(torch.uint32),
            scales,
            tiles,
            second if order == FP4 else tiles,
            dense,
            rows,
            count,
            groups,
            first,
            TILE_WORDS=size // 4,
            P=groups_per_tile(scheme),
            ORDER=order,
            ZERO=scheme.zero_points,
            NVFP4=scheme.weight == "nvfp4",
            ROW_UNIT=1 / 256 if scheme.weight == "nvfp4" else 2.0,
            TYPE=dtype,
            num_warps=4,
        )
        stop = min(rows, (first + tile_rows) * 16)
        z[:, first * 16 : stop] = flat @ dense[: stop - first * 16, :k].T
    if not plain:
        width = call.out.shape[-1]
        finish(
            z,
            call.bias,
            None if call.residual is None else call.residual.view(-1, width),
            call.silu_mul,
            call.out.view(-1, width),
        )


def aot(target: Target) -> list[AotCase]:
    """One case for each order of codes and kind of scale."""
    ints = dict.fromkeys(("n", "tiles", "groups", "first"), "i32")
    cases = []
    for name, order, scale, size, per_tile, extra in (
        ("int4_g128", INT4, "*bf16", 1056, 1, {}),
        ("int4_g32_zp", INT4, "*fp16", 1216, 4, {"ZERO": True}),
        ("nvfp4", FP4, "*u8", 1152, 8, {"NVFP4": True, "ROW_UNIT": 1 / 256}),
        ("mxfp4", FP4, "*u8", 1088, 4, {"ROW_UNIT": 2.0}),
        ("int8", INT8, "*bf16", 2080, 1, {}),
        ("fp8", FP8, "*fp32", 2112, 1, {}),
    ):
        constants = {
            "TILE_WORDS": size // 4,
            "P": per_tile,
            "ORDER": order,
            "ZERO": False,
            "NVFP4": False,
            "ROW_UNIT": 1.0,
            "TYPE": tl.bfloat16,
            **extra,
        }
        pointers = {
            "words_ptr": "*u32",
            "scales": scale,
            "octets": "*u8",
            "row_scale": "*fp32",
            "out": "*bf16",
        }
        cases.append(AotCase(name, dequantize, pointers | ints, constants, {"num_warps": 4}))
    return cases


KERNEL = Kernel(
    op="linear",
    name="linear_dequant_frag16",
    provider="gristmill",
    language="triton",
    target=f"{__name__}:launch",
    aot=f"{__name__}:aot",
    requires=Requirement(code="triton"),
    summary="frag16 tiles dequantized some rows at a time, then torch's product: any M over the layouts of the decode kernels",
    accepts=accepts,
    config=config,
    layouts=TILES,
    dequantizes=True,
    priority=40,
)
