"""Sampling in Triton: one program a request. Filters find their threshold by counting (or weighing) 16 ranges a pass."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase


@triton.jit
def philox_words(seed, index, token):
    """The first two words of Philox4x32-10: key = seed, counter = (index low, index high, token, 0)."""
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    zero = (token * 0).to(tl.uint32)
    c0, c1, c2, c3 = zero + index.to(tl.uint32), zero + (index >> 32).to(tl.uint32), token.to(tl.uint32), zero
    m0 = (token * 0).to(tl.uint64) + 0xD2511F53
    m1 = (token * 0).to(tl.uint64) + 0xCD9E8D57
    w0 = zero + 0x9E3779B9
    w1 = zero + 0xBB67AE85
    k0, k1 = zero + k0, zero + k1
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * m0
        p1 = c2.to(tl.uint64) * m1
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = p1.to(tl.uint32)
        c3 = p0.to(tl.uint32)
        k0 += w0
        k1 += w1
    return c0, c1


@triton.jit
def gumbel(seed, index, token):
    """float64 Gumbel noise from 52 bits, -log(-log(u)) with u an odd multiple of 2^-53."""
    w0, w1 = philox_words(seed, index, token)
    bits = (w0.to(tl.int64) << 20) | (w1.to(tl.int64) >> 12)
    u = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(u))


@triton.jit
def scaled(row, place, inside, temperature):
    """Logits over temperature, float32 with IEEE division; -inf outside."""
    return tl.div_rn(tl.load(row + place, mask=inside, other=float("-inf")).to(tl.float32), temperature)


@triton.jit
def order_of(z):
    """float32 order as int64 in [0, 2^32); -0 counts as 0."""
    bits = tl.where(z == 0, 0.0, z).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -1 - (bits & 0x7FFFFFFF), bits).to(tl.int64) + 2147483648


@triton.jit
def search(row, v, temperature, top, least, wanted, MODE: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key t with weight(key >= t) >= wanted, and weight(key > t).

    MODE 0: keys are orders, each token counts 1. MODE 1: orders from `least` up weigh their probability. MODE 2: keys are
    v - id of the tokens of order `least`, each counts 1.
    """
    bins = tl.arange(0, 16)
    base = least * 0
    above = top * 0.0
    for step in tl.static_range(8):
        shift = 28 - 4 * step
        histogram = tl.zeros([16], dtype=tl.float64)
        for start in range(0, v, BLOCK):
            place = start + tl.arange(0, BLOCK)
            z = scaled(row, place, place < v, temperature)
            order = order_of(z)
            valid = place < v
            weight = tl.full([BLOCK], 1.0, tl.float64)
            key = order
            if MODE == 1:
                weight = tl.exp(z.to(tl.float64) - top)
                valid = valid & (order >= least)
            if MODE == 2:
                key = (v - place).to(tl.int64)
                valid = valid & (order == least)
            digit = tl.where(valid & (key >= base), (key - base) >> shift, 16)
            hit = digit[:, None] == bins[None, :]
            histogram += tl.sum(tl.where(hit, weight[:, None], 0.0), 0)
        from_here = tl.sum(tl.where(bins[None, :] >= bins[:, None], histogram[None, :], 0.0), 1)
        best = tl.max(tl.where(above + from_here >= wanted, bins, 0), 0)
        above += tl.sum(tl.where(bins > best, histogram, 0.0), 0)
        base += best.to(tl.int64) << shift
    return base, above


@triton.jit
def sample_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, seeds, indices, ids, stride, v, BLOCK: tl.constexpr
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    row = logits + request * stride
    temperature = tl.load(temperatures + request)
    greedy = (temperature >= 1e-5) == 0
    temperature = tl.where(greedy, 1.0, temperature)
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    wrong = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, v, BLOCK):
        place = start + tl.arange(0, BLOCK)
        z = scaled(row, place, place < v, temperature)
        wrong = tl.where((z != z) | (z == float("inf")), 1, wrong)
        most = tl.where(z > most, z, most)
    highest = tl.max(most, 0)
    valid = (tl.max(wrong, 0) == 0) & (highest > float("-inf"))
    top = tl.where(valid, highest, 0.0).to(tl.float64)
    least = top.to(tl.int64) * 0
    pivot = least
    last = least
    floor = top * 0.0
    if valid & (greedy == 0):
        k = tl.load(top_ks + request)
        if (k > 0) & (k < v):
            least, _ = search(row, v, temperature, top, least, k.to(tl.float64), 0, BLOCK)
        p = tl.load(top_ps + request).to(tl.float64)
        if p < 1.0:
            sums = tl.zeros([BLOCK], dtype=tl.float64)
            for start in range(0, v, BLOCK):
                place = start + tl.arange(0, BLOCK)
                z = scaled(row, place, place < v, temperature)
                inside = (place < v) & (order_of(z) >= least)
                sums += tl.where(inside, tl.exp(z.to(tl.float64) - top), 0.0)
            wanted = p * tl.sum(sums, 0)
            # The most probable always stays: with no mass asked for, search for its smallest share.
            pivot, above = search(row, v, temperature, top, least, tl.where(wanted > 0, wanted, 1e-300), 1, BLOCK)
            equals = tl.zeros([BLOCK], dtype=tl.float64)
            sums = tl.zeros([BLOCK], dtype=tl.float64)
            for start in range(0, v, BLOCK):
                place = start + tl.arange(0, BLOCK)
                z = scaled(row, place, place < v, temperature)
                same = (place < v) & (order_of(z) == pivot)
                equals += tl.where(same, 1.0, 0.0)
                sums = tl.where(same, tl.exp(z.to(tl.float64) - top), sums)
            count = tl.sum(equals, 0)
            room = tl.maximum(tl.ceil((wanted - above) / tl.max(sums, 0)), 1.0)
            if room < count:
                last, _ = search(row, v, temperature, top, pivot, room, 2, BLOCK)
        floor = tl.load(min_ps + request).to(tl.float64)
    seed = tl.load(seeds + request)
    index = tl.load(indices + request)
    best = tl.full([BLOCK], float("-inf"), tl.float64)
    chosen = tl.full([BLOCK], 2147483647, tl.int32)
    for start in range(0, v, BLOCK):
        place = start + tl.arange(0, BLOCK)
        z = scaled(row, place, place < v, temperature)
        order = order_of(z)
        keep = (place < v) & (order >= least) & ((order > pivot) | ((order == pivot) & (v - place >= last)))
        score = z.to(tl.float64)
        if greedy == 0:
            keep = keep & (((floor > 0.0) == 0) | (tl.exp(score - top) >= floor))
            score += gumbel(seed, index, place)
        better = keep & (score > best)
        best = tl.where(better, score, best)
        chosen = tl.where(better, place, chosen)
    winner = tl.min(tl.where(best == tl.max(best, 0), chosen, 2147483647), 0)
    tl.store(ids + request, tl.where(valid, winner, -1).to(tl.int64))


def launch(
    config: Config, logits: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, seed: Any, index: Any, ids: Any
) -> None:
    """logits [B, V] -> ids [B]."""
    rows, vocabulary = logits.shape
    if rows:
        sample_kernel[(rows,)](
            logits, temperature, top_k, top_p, min_p, seed, index, ids, logits.stride(0), vocabulary,
            BLOCK=config["block"], num_warps=config["warps"],
        )  # fmt: skip


def aot(target: Target) -> list[AotCase]:
    """What the compile matrix builds."""
    types = {"logits": "*bf16", "temperatures": "*fp32", "top_ks": "*i32", "top_ps": "*fp32", "min_ps": "*fp32",
             "seeds": "*i64", "indices": "*i64", "ids": "*i64", "stride": "i32", "v": "i32"}  # fmt: skip
    return [
        AotCase("bf16", sample_kernel, types, {"BLOCK": 512}, {"num_warps": 8}),
        AotCase("fp32", sample_kernel, types | {"logits": "*fp32"}, {"BLOCK": 512}, {"num_warps": 8}),
    ]
