"""Norm, rotary embedding and cache write in Triton, one launch: a program per token and tile of heads of q, k or v."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import cdiv, next_power_of_2
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase
from gristmill.kernels.dependent_launch import begin, overlap_on, overlapped
from gristmill.kernels.kv_cache._e4m3_triton import e4m3_encode
from gristmill.kernels.kv_cache.quantized import as_bytes, by_token, scale_strides
from gristmill.kernels.lazy_triton import function_of, jit, tl

if TYPE_CHECKING:
    from gristmill.kernels.calls import QkNormRopeCacheCall


def _most(problem: Problem) -> int:
    return next_power_of_2(max(problem.integers("heads", "kv_heads")))


def config(problem: Problem, target: Target) -> Config:
    """Heads of a token in tiles of about 1,024 elements."""
    heads = max(1, min(_most(problem), 1024 // next_power_of_2(problem.integer("head_dim"))))
    return {"heads": heads, "warps": 4}


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Tiles from one head to all of them, of at most 8,192 elements."""
    most = min(_most(problem), max(1, 8192 // next_power_of_2(problem.integer("head_dim"))))
    return [
        {"heads": heads, "warps": warps}
        for heads in (1, 2, 4, 8, 16, 32, 64)
        if heads <= most
        for warps in (1, 2, 4, 8)
    ]


@jit
def largest(x):
    """The largest magnitude of each row of x float32 [H, N]. As integers magnitudes are in the same order, and NaN is the largest."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@jit
def put(at, x, inside, scale, QUANTIZED: tl.constexpr):
    """x float32 [H, N] to `at`, as codes of x / scale [H] or rounded to the dtype of `at`."""
    if QUANTIZED:
        tl.store(at, e4m3_encode(tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))), mask=inside)
    else:
        tl.store(at, x.to(at.dtype.element_ty), mask=inside)


@jit
def scale_of(at, amax, is_head, TOKEN_SCALES: tl.constexpr):
    """The scales [H] at pointers `at`: read, or written from the largest magnitudes [H] as integers."""
    if TOKEN_SCALES:
        value = amax.to(tl.float32, bitcast=True)
        scale = tl.div_rn(tl.where(value < 1e-10, 1e-10, value), tl.full(value.shape, 448.0, tl.float32))
        tl.store(at, scale, mask=is_head)
    else:
        scale = tl.load(at, mask=is_head, other=1.0)
    return scale


@jit
def normalized(x, inverse_rms, weight, at, inside, NORM: tl.constexpr, dtype: tl.constexpr):
    """x float32 [H, N] times inverse_rms [H] and weight[at], rounded to dtype."""
    if NORM:
        gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        x = (x * inverse_rms[:, None] * gain).to(dtype).to(tl.float32)
    return x


@jit
def turn(
    source,
    weight,
    cos_sin,
    position,
    rows,
    eps,
    to,
    scale_at,
    is_head,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    QUANTIZED: tl.constexpr,
    TOKEN_SCALES: tl.constexpr,
):
    """Heads at pointers source [H, 1], normalized and rotated, to pointers `to` [H, 1]."""
    dtype: tl.constexpr = source.dtype.element_ty
    REST: tl.constexpr = D - 2 * HALF
    pair = tl.arange(0, BLOCK)[None, :]
    # A position outside the table is never read: its NaN marks the token.
    position += tl.zeros([1, BLOCK], dtype=tl.int64)
    known = (pair < HALF) & (position >= 0) & (position < rows)
    entry = cos_sin + position * (2 * HALF) + pair
    cos = tl.load(entry, mask=known, other=float("nan"))
    sin = tl.load(entry + HALF, mask=known, other=float("nan"))
    inside = is_head[:, None] & (pair < HALF)
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    inside_rest = is_head[:, None] & (rest < D)
    at = tl.arange(0, 2 * BLOCK)[None, :]
    inside_both = is_head[:, None] & (at < 2 * HALF)
    if INTERLEAVED:
        # Pairs are loaded side by side and parted in registers: a load of every other element fills half of what it moves.
        both = tl.load(source + at, mask=inside_both, other=0.0).to(tl.float32)
        squares = tl.sum(both * both, 1)
    else:
        a = tl.load(source + pair, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + HALF + pair, mask=inside, other=0.0).to(tl.float32)
        squares = tl.sum(a * a + b * b, 1)
    if REST > 0:
        c = tl.load(source + rest, mask=inside_rest, other=0.0).to(tl.float32)
        squares += tl.sum(c * c, 1)
    inverse_rms = 1.0 / tl.sqrt(squares / D + eps)
    if INTERLEAVED:
        both = normalized(both, inverse_rms, weight, at, at < 2 * HALF, NORM, dtype)
        a, b = tl.split(tl.reshape(both, [both.shape[0], BLOCK, 2]))
    else:
        a = normalized(a, inverse_rms, weight, pair, pair < HALF, NORM, dtype)
        b = normalized(b, inverse_rms, weight, HALF + pair, pair < HALF, NORM, dtype)
    first = tl.where(inside, (a * cos - b * sin).to(dtype).to(tl.float32), 0.0)
    second = tl.where(inside, (b * cos + a * sin).to(dtype).to(tl.float32), 0.0)
    scale = inverse_rms
    if QUANTIZED:
        amax = tl.maximum(largest(first), largest(second))
    if REST > 0:
        c = normalized(c, inverse_rms, weight, rest, rest < D, NORM, dtype)
        if QUANTIZED:
            amax = tl.maximum(amax, largest(c))
    if QUANTIZED:
        scale = scale_of(scale_at, amax, is_head, TOKEN_SCALES)
    if INTERLEAVED:
        turned = tl.reshape(tl.join(first, second), [first.shape[0], 2 * BLOCK])
        put(to + at, turned, inside_both, scale, QUANTIZED)
    else:
        put(to + pair, first, inside, scale, QUANTIZED)
        put(to + HALF + pair, second, inside, scale, QUANTIZED)
    if REST > 0:
        put(to + rest, c, inside_rest, scale, QUANTIZED)


@jit
def qk_norm_rope_cache_kernel(
    qkv,
    q_weight,
    k_weight,
    positions,
    cos_sin,
    key_cache,
    value_cache,
    slot_mapping,
    k_scale,
    v_scale,
    q,
    eps,
    qkv_token,
    qkv_head,
    key_block,
    key_place,
    key_head,
    value_block,
    value_place,
    value_head,
    k_scale_block,
    k_scale_place,
    k_scale_head,
    v_scale_block,
    v_scale_place,
    v_scale_head,
    q_heads,
    kv_heads,
    rows,
    block_size,
    slots,
    q_tiles,
    kv_tiles,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    QUANTIZED: tl.constexpr,
    TOKEN_SCALES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    source = qkv + token * qkv_token
    if tile < q_tiles:
        head = (tile * HEADS + tl.arange(0, HEADS)).to(tl.int64)
        turn(
            source + head[:, None] * qkv_head,
            q_weight,
            cos_sin,
            tl.load(positions + token),
            rows,
            eps,
            q + (token * q_heads + head[:, None]) * D,
            k_scale + head,
            head < q_heads,
            D,
            HALF,
            BLOCK,
            BLOCK_REST,
            INTERLEAVED,
            NORM,
            False,
            False,
        )
    else:
        slot = tl.load(slot_mapping + token)
        if (slot >= 0) & (slot < slots):
            block = slot // block_size
            place = slot % block_size
            if tile < q_tiles + kv_tiles:
                head = ((tile - q_tiles) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
                turn(
                    source + (q_heads + head[:, None]) * qkv_head,
                    k_weight,
                    cos_sin,
                    tl.load(positions + token),
                    rows,
                    eps,
                    key_cache + block * key_block + place * key_place + head[:, None] * key_head,
                    k_scale + block * k_scale_block + place * k_scale_place + head * k_scale_head,
                    head < kv_heads,
                    D,
                    HALF,
                    BLOCK,
                    BLOCK_REST,
                    INTERLEAVED,
                    NORM,
                    QUANTIZED,
                    TOKEN_SCALES,
                )
            else:
                head = ((tile - q_tiles - kv_tiles) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
                offset = tl.arange(0, BLOCK_D)[None, :]
                inside = (head < kv_heads)[:, None] & (offset < D)
                at = source + (q_heads + kv_heads + head[:, None]) * qkv_head + offset
                to = value_cache + block * value_block + place * value_place + head[:, None] * value_head
                if QUANTIZED:
                    values = tl.load(at, mask=inside, other=0.0).to(tl.float32)
                    scale_at = v_scale + block * v_scale_block + place * v_scale_place + head * v_scale_head
                    scale = scale_of(scale_at, largest(values), head < kv_heads, TOKEN_SCALES)
                    put(to + offset, values, inside, scale, QUANTIZED)
                else:
                    tl.store(to + offset, tl.load(at, mask=inside), mask=inside)


def launch(config: Config, call: QkNormRopeCacheCall) -> None:
    """The arguments of `qk_norm_rope_cache.reference`, then q [T, Hq, D]."""
    tokens, q_heads, d = call.q.shape
    blocks, block_size, kv_heads, _ = call.key_cache.shape
    heads, (rows, rot) = int(config["heads"]), call.cos_sin.shape
    q_tiles, kv_tiles = cdiv(q_heads, heads), cdiv(kv_heads, heads)
    quantized = call.k_scale is not None
    if not tokens:
        return
    qk_norm_rope_cache_kernel[(tokens, q_tiles + 2 * kv_tiles)](
        call.qkv,
        call.qkv if call.q_weight is None else call.q_weight,
        call.qkv if call.k_weight is None else call.k_weight,
        call.positions,
        call.cos_sin,
        as_bytes(call.key_cache) if quantized else call.key_cache,
        as_bytes(call.value_cache) if quantized else call.value_cache,
        call.slot_mapping,
        call.cos_sin if call.k_scale is None else call.k_scale,
        call.cos_sin if call.v_scale is None else call.v_scale,
        call.q,
        call.eps,
        call.qkv.stride(0),
        call.qkv.stride(1),
        *call.key_cache.stride()[:3],
        *call.value_cache.stride()[:3],
        *scale_strides(call.k_scale),
        *scale_strides(call.v_scale),
        q_heads,
        kv_heads,
        rows,
        block_size,
        blocks * block_size,
        q_tiles,
        kv_tiles,
        D=d,
        HALF=rot // 2,
        BLOCK=next_power_of_2(rot // 2),
        BLOCK_REST=next_power_of_2(max(d - rot, 1)),
        BLOCK_D=next_power_of_2(d),
        HEADS=heads,
        INTERLEAVED=bool(call.interleaved),
        NORM=call.q_weight is not None,
        QUANTIZED=quantized,
        TOKEN_SCALES=call.k_scale is not None and by_token(call.k_scale),
        num_warps=config["warps"],
        **overlapped(call.q),
    )


def aot(target: Target) -> list[AotCase]:
    """What the compile matrix builds, in bf16: both styles, with and without norms, a rest that is not rotated, and both kinds of
    scales; block strides past 2³¹ elements."""
    kernel = qk_norm_rope_cache_kernel
    names = [name for name in function_of(kernel).arg_names if name.lower() == name]
    sizes = {name: "i64" if name in ("key_block", "value_block") else "i32" for name in names}
    floats = dict.fromkeys(("qkv", "q_weight", "k_weight", "key_cache", "value_cache", "q"), "*bf16")
    floats |= dict.fromkeys(("cos_sin", "k_scale", "v_scale"), "*fp32") | {"eps": "fp32"}
    signature = sizes | floats | dict.fromkeys(("positions", "slot_mapping"), "*i64")
    codes = dict.fromkeys(("key_cache", "value_cache"), "*u8")
    constants = {"D": 128, "HALF": 64, "BLOCK": 64, "BLOCK_REST": 1, "BLOCK_D": 128, "HEADS": 8}
    flags = dict.fromkeys(("INTERLEAVED", "NORM", "QUANTIZED", "TOKEN_SCALES"), False)
    partial = {"D": 96, "HALF": 32, "BLOCK": 32, "BLOCK_REST": 32}
    cases: dict[str, tuple[dict[str, str], dict[str, int | bool]]] = {
        "neox": ({}, {}),
        "neox_norm": ({}, {"NORM": True}),
        "gptj_partial": ({}, {"INTERLEAVED": True, "NORM": True} | partial),
        "fp8_head": (codes, {"NORM": True, "QUANTIZED": True}),
        "fp8_token": (codes, {"NORM": True, "QUANTIZED": True, "TOKEN_SCALES": True}),
    }
    return [
        AotCase(
            name,
            kernel,
            signature | pointers,
            constants | flags | chosen | overlap_on(target),
            {"num_warps": 4},
        )
        for name, (pointers, chosen) in cases.items()
    ]


KERNEL = Kernel(
    op="qk_norm_rope_cache",
    name="qk_norm_rope_cache_triton",
    provider="gristmill",
    language="triton",
    target=f"{__name__}:launch",
    aot=f"{__name__}:aot",
    requires=Requirement(code="triton"),
    summary="one program per token and tile of heads of q, k or v, float32 inside",
    config=config,
    space=space,
    supports=("w",),
    batch_invariant=True,
    waits=True,
    triggers=True,
    priority=50,
)
