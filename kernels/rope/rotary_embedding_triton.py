"""Rotary embedding in Triton: one program per token and tile of heads; the tiles of k follow those of q."""

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
from gristmill.kernels.lazy_triton import jit, tl

if TYPE_CHECKING:
    from gristmill.kernels.calls import RotaryEmbeddingCall


def _power(n: int) -> int:
    return next_power_of_2(n)


def config(problem: Problem, target: Target) -> Config:
    """Heads of a token in tiles of about 1,024 pairs."""
    block = _power(problem.integer("rot") // 2)
    most = _power(max(problem.integer("hq"), problem.integer("hk")))
    return {"heads": max(1, min(most, 1024 // block)), "warps": 4}


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Tiles from one head to all of them."""
    most = _power(max(problem.integer("hq"), problem.integer("hk")))
    return [
        {"heads": heads, "warps": warps}
        for heads in (1, 2, 4, 8, 16, 32, 64)
        if heads <= most
        for warps in (1, 2, 4, 8)
    ]


@jit
def rotary_embedding_kernel(
    q,
    k,
    positions,
    cos_sin,
    q_token,
    q_head,
    k_token,
    k_head,
    q_heads,
    k_heads,
    rows,
    q_tiles,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    pair = tl.arange(0, BLOCK)
    position = tl.load(positions + token) + tl.zeros([BLOCK], dtype=tl.int64)
    # A position outside the table is never read: its NaN marks the token.
    known = (pair < HALF) & (position >= 0) & (position < rows)
    entry = cos_sin + position * (2 * HALF) + pair
    cos = tl.load(entry, mask=known, other=float("nan"))[None, :]
    sin = tl.load(entry + HALF, mask=known, other=float("nan"))[None, :]
    if tile < q_tiles:
        head = (tile * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
        is_head = head < q_heads
        base = q + token * q_token + head * q_head
    else:
        head = ((tile - q_tiles) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
        is_head = head < k_heads
        base = k + token * k_token + head * k_head
    if INTERLEAVED:
        # Pairs are loaded side by side and parted in registers: a load of every other element fills half of what it moves.
        at = tl.arange(0, 2 * BLOCK)[None, :]
        inside = is_head & (at < 2 * HALF)
        both = tl.load(base + at, mask=inside, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, [HEADS, BLOCK, 2]))
        turned = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), [HEADS, 2 * BLOCK])
        tl.store(base + at, turned.to(q.dtype.element_ty), mask=inside)
    else:
        inside = is_head & (pair < HALF)[None, :]
        first = base + pair[None, :]
        a = tl.load(first, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(first + HALF, mask=inside, other=0.0).to(tl.float32)
        tl.store(first, (a * cos - b * sin).to(q.dtype.element_ty), mask=inside)
        tl.store(first + HALF, (b * cos + a * sin).to(q.dtype.element_ty), mask=inside)


def launch(config: Config, call: RotaryEmbeddingCall) -> None:
    """q [T, Hq, D] and k [T, Hk, D] or None, in place; positions [T], cos_sin [P, rot]."""
    k = call.k
    tokens, q_heads, _ = call.q.shape
    k_heads = 0 if k is None else k.shape[1]
    k = call.q if k is None else k
    heads, (rows, rot) = int(config["heads"]), call.cos_sin.shape
    q_tiles, k_tiles = cdiv(q_heads, heads), cdiv(k_heads, heads)
    if tokens:
        rotary_embedding_kernel[(tokens, q_tiles + k_tiles)](
            call.q,
            k,
            call.positions,
            call.cos_sin,
            call.q.stride(0),
            call.q.stride(1),
            k.stride(0),
            k.stride(1),
            q_heads,
            k_heads,
            rows,
            q_tiles,
            HALF=rot // 2,
            BLOCK=next_power_of_2(rot // 2),
            HEADS=heads,
            INTERLEAVED=bool(call.interleaved),
            num_warps=config["warps"],
            **overlapped(call.q),
        )


def aot(target: Target) -> list[AotCase]:
    """What the compile matrix builds: both styles, in bf16."""
    pointers = {"q": "*bf16", "k": "*bf16", "positions": "*i64", "cos_sin": "*fp32"}
    names = ("q_token", "q_head", "k_token", "k_head", "q_heads", "k_heads", "rows", "q_tiles")
    sizes = dict.fromkeys(names, "i32")
    return [
        AotCase(
            style,
            rotary_embedding_kernel,
            pointers | sizes,
            {"HALF": 64, "BLOCK": 64, "HEADS": 16, "INTERLEAVED": style == "gptj"} | overlap_on(target),
            {"num_warps": 4},
        )
        for style in ("neox", "gptj")
    ]


KERNEL = Kernel(
    op="rotary_embedding",
    name="rotary_embedding_triton",
    provider="gristmill",
    language="triton",
    target=f"{__name__}:launch",
    aot=f"{__name__}:aot",
    requires=Requirement(code="triton"),
    summary="one program per token and tile of heads of q or k, float32 inside",
    config=config,
    space=space,
    batch_invariant=True,
    waits=True,
    triggers=True,
    priority=50,
)
