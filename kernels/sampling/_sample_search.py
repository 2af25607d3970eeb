"""The filters of sampling in Triton: from a row to the pivot (key, last token) above which everything survives."""

from __future__ import annotations

import triton
import triton.language as tl

BINS = tl.constexpr(256)


@triton.jit
def divisor_of(temperatures, request):
    """(what logits are divided by, whether the request is greedy)."""
    temperature = tl.load(temperatures + request)
    greedy = (temperature >= 1e-5) == 0
    return tl.where(greedy, 1.0, temperature), greedy


@triton.jit
def scaled(row, place, inside, divisor):
    """Logits over temperature, float32 with IEEE division; -inf outside."""
    return tl.div_rn(tl.load(row + place, mask=inside, other=float("-inf")).to(tl.float32), divisor)


@triton.jit
def keys_of(z):
    """int32 in the order of float32; -0 counts as 0."""
    bits = tl.where(z == 0, 0.0, z).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def values_of(key):
    """The float32 of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def ranges_of(z, top):
    """Range 0...255 by distance below the largest: 32 ranges an octave of distance + 2, the last one takes the rest."""
    return tl.minimum((((top - z) + 2.0).to(tl.int32, bitcast=True) - 0x40000000) >> 18, BINS - 1)


@triton.jit
def weights_of(z, top, unit):
    """exp(z - top) as an integer number of `unit`ths, in float64: sums of them are exact."""
    return (tl.exp(z.to(tl.float64) - top.to(tl.float64)) * unit + 0.5).to(tl.int64)


@triton.jit
def row_top(maxima, faults, request, splits, SPLITS: tl.constexpr):
    """(the largest scaled logit of a row, or 0; whether the row has an answer)."""
    part = tl.arange(0, SPLITS)
    slot = request * splits + part
    top = tl.max(tl.load(maxima + slot, mask=part < splits, other=float("-inf")), 0)
    wrong = tl.max(tl.load(faults + slot, mask=part < splits, other=0), 0)
    valid = (wrong == 0) & (top > float("-inf"))
    return tl.where(valid, top, 0.0), valid


@triton.jit
def filters_of(top_ks, top_ps, request, v):
    """(k, whether top_k is on, p, whether top_p is on)."""
    k = tl.load(top_ks + request)
    p = tl.load(top_ps + request)
    return k, (k > 0) & (k < v), tl.maximum(p, 0.0).to(tl.float64), p < 1.0


@triton.jit
def count_kernel(
    logits, temperatures, top_ks, top_ps, maxima, faults, histograms, stride, v, chunk, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """histograms [requests, splits, 256]: tokens of each range."""
    request, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row = logits + request * stride
    divisor, greedy = divisor_of(temperatures, request)
    top, valid = row_top(maxima, faults, request, splits, SPLITS)
    _, by_k, _, by_p = filters_of(top_ks, top_ps, request, v)
    if valid & (greedy == 0) & (by_k | by_p):
        counts = tl.zeros([BINS], dtype=tl.int32)
        for start in range(split * chunk, tl.minimum(split * chunk + chunk, v), BLOCK):
            place = start + tl.arange(0, BLOCK)
            z = scaled(row, place, place < v, divisor)
            counts += tl.histogram(ranges_of(z, top), BINS, mask=place < v)
        tl.store(histograms + (request * splits + split) * BINS + tl.arange(0, BINS), counts)


@triton.jit
def bracket_kernel(
    temperatures, top_ks, top_ps, maxima, faults, histograms, offsets, brackets, v, splits, SPLITS: tl.constexpr
):
    """brackets [requests, 3]: first and last range of the candidates, and how many there are; offsets [requests, splits].

    With top_k the candidates are all from its threshold's range up. With top_p alone they are the ranges that the pivot
    can be in: with A the mass down to a range and R the rest, it is the first range with A (1 - p) >= R p, and the edges of
    ranges bound A and R from both sides.
    """
    request = tl.program_id(0).to(tl.int64)
    _, greedy = divisor_of(temperatures, request)
    _, valid = row_top(maxima, faults, request, splits, SPLITS)
    k, by_k, p, by_p = filters_of(top_ks, top_ps, request, v)
    if valid & (greedy == 0) & (by_k | by_p):
        bins = tl.arange(0, BINS)
        rows = tl.arange(0, 8)
        base = histograms + request * splits * BINS
        counts = tl.zeros([BINS], dtype=tl.int32)
        for start in range(0, splits, 8):
            part = (start + rows)[:, None]
            counts += tl.sum(tl.load(base + part * BINS + bins[None, :], mask=part < splits, other=0), 0)
        first = k * 0
        if by_k:
            last = tl.sum((tl.cumsum(counts, 0) < k).to(tl.int32), 0)
        else:
            near = ((0x40000000 + (bins << 18)).to(tl.float32, bitcast=True) - 2.0).to(tl.float64)
            far = ((0x40000000 + ((bins + 1) << 18)).to(tl.float32, bitcast=True) - 2.0).to(tl.float64)
            tokens = counts.to(tl.float64)
            # 1.001: far above the float32 rounding of distances.
            heavy = tokens * tl.exp(-near) * 1.001
            light = tl.where(bins < BINS - 1, tokens * tl.exp(-far), 0.0)
            most, least = tl.cumsum(heavy, 0), tl.cumsum(light, 0)
            possible = most * (1.0 - p) >= p * (tl.sum(light, 0) - least)
            certain = least * (1.0 - p) >= p * (tl.sum(heavy, 0) - most)
            first = tl.sum((possible == 0).to(tl.int32), 0)
            last = tl.minimum(tl.sum((certain == 0).to(tl.int32), 0), BINS - 1)
        inside = ((bins >= first) & (bins <= last))[None, :]
        total = k * 0
        for start in range(0, splits, 8):
            part = (start + rows)[:, None]
            held = tl.load(base + part * BINS + bins[None, :], mask=(part < splits) & inside, other=0)
            each = tl.sum(held, 1)
            place = start + rows
            tl.store(offsets + request * splits + place, total + tl.cumsum(each, 0) - each, mask=place < splits)
            total += tl.sum(each, 0)
        tl.store(brackets + 3 * request, first)
        tl.store(brackets + 3 * request + 1, last)
        tl.store(brackets + 3 * request + 2, total)


@triton.jit
def gather_kernel(
    logits, temperatures, top_ks, top_ps, maxima, faults, offsets, brackets, masses, keys, tokens, weights, stride, v, chunk,
    listed, unit, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """keys, tokens, weights [requests, listed]: the candidates in the order of their ids, where they fit.

    masses [requests, splits, 2]: of all tokens, and of those above the bracket; written for top_p without top_k.
    """
    request, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row = logits + request * stride
    divisor, greedy = divisor_of(temperatures, request)
    top, valid = row_top(maxima, faults, request, splits, SPLITS)
    _, by_k, _, by_p = filters_of(top_ks, top_ps, request, v)
    if valid & (greedy == 0) & (by_k | by_p):
        first = tl.load(brackets + 3 * request)
        last = tl.load(brackets + 3 * request + 1)
        fits = tl.load(brackets + 3 * request + 2) <= listed
        free = request * listed + tl.load(offsets + request * splits + split)
        whole = by_k == 0
        total = free * 0
        above = free * 0
        for start in range(split * chunk, tl.minimum(split * chunk + chunk, v), BLOCK):
            place = start + tl.arange(0, BLOCK)
            z = scaled(row, place, place < v, divisor)
            found = ranges_of(z, top)
            candidate = (place < v) & (found >= first) & (found <= last)
            here = tl.sum(candidate.to(tl.int32), 0)
            if whole | (fits & (here > 0)):
                weight = tl.where(place < v, weights_of(z, top, unit), 0)
                if whole:
                    total += tl.sum(weight, 0)
                    above += tl.sum(tl.where(found < first, weight, 0), 0)
                if fits & (here > 0):
                    slot = free + tl.cumsum(candidate.to(tl.int32), 0) - 1
                    tl.store(keys + slot, keys_of(z), mask=candidate)
                    tl.store(tokens + slot, place, mask=candidate)
                    tl.store(weights + slot, weight, mask=candidate)
            free += here
        tl.store(masses + (request * splits + split) * 2, total)
        tl.store(masses + (request * splits + split) * 2 + 1, above)


@triton.jit
def measure(
    row, divisor, top, unit, first, last, keys, tokens, weights, fits, size, pivot, at, MODE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Over the candidates, listed or not: 0, how many have key >= at; 1, their mass; 2, how many of key `pivot` have an id
    <= -at; 3, the smallest key; 4, the largest."""
    best = at * 0
    if MODE == 3:
        best += 2147483647
    if MODE == 4:
        best += -2147483648
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < size
        if fits:
            key = tl.load(keys + place, mask=inside, other=0)
        else:
            z = scaled(row, place, inside, divisor)
            found = ranges_of(z, top)
            inside = inside & (found >= first) & (found <= last)
            key = keys_of(z)
        if MODE == 0:
            best += tl.sum((inside & (key >= at)).to(tl.int32), 0)
        if MODE == 1:
            if fits:
                weight = tl.load(weights + place, mask=inside, other=0)
            else:
                weight = weights_of(values_of(key), top, unit)
            best += tl.sum(tl.where(inside & (key >= at), weight, 0), 0)
        if MODE == 2:
            token = place
            if fits:
                token = tl.load(tokens + place, mask=inside, other=0)
            best += tl.sum((inside & (key == pivot) & (token <= -at)).to(tl.int32), 0)
        if MODE == 3:
            best = tl.minimum(best, tl.min(tl.where(inside, key, 2147483647), 0).to(tl.int64))
        if MODE == 4:
            best = tl.maximum(best, tl.max(tl.where(inside, key, -2147483648), 0).to(tl.int64))
    return best


@triton.jit
def bisect(
    row, divisor, top, unit, first, last, keys, tokens, weights, fits, size, pivot, low, high, base, wanted,
    MODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest t in [low, high] with base + measure(t) >= wanted, given that low has it."""
    while low < high:
        middle = high - ((high - low) >> 1)
        found = base + measure(row, divisor, top, unit, first, last, keys, tokens, weights, fits, size, pivot, middle,
                               MODE, BLOCK)  # fmt: skip
        enough = found.to(tl.float64) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


# A vocabulary of one token would become a constant, on which Triton 3.6 fails to compile.
@triton.jit(do_not_specialize=["v"])
def search_kernel(
    logits, temperatures, top_ks, top_ps, maxima, faults, brackets, masses, keys, tokens, weights, pivots, stride, v, splits,
    listed, unit, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """pivots [requests, 2]: tokens of a larger key survive, and those of this key up to this id. All, without filters."""
    request = tl.program_id(0).to(tl.int64)
    row = logits + request * stride
    divisor, greedy = divisor_of(temperatures, request)
    top, valid = row_top(maxima, faults, request, splits, SPLITS)
    k, by_k, p, by_p = filters_of(top_ks, top_ps, request, v)
    pivot = request * 0 - 2147483648
    last_id = request * 0 + 2147483647
    if valid & (greedy == 0) & (by_k | by_p):
        first = tl.load(brackets + 3 * request)
        last = tl.load(brackets + 3 * request + 1)
        count = tl.load(brackets + 3 * request + 2)
        fits = count <= listed
        size = tl.where(fits, count, v)
        keys += request * listed
        tokens += request * listed
        weights += request * listed
        zero = request * 0
        pivot = measure(row, divisor, top, unit, first, last, keys, tokens, weights, fits, size, zero, zero, 3, BLOCK)
        high = measure(row, divisor, top, unit, first, last, keys, tokens, weights, fits, size, zero, zero, 4, BLOCK)
        total = zero
        above = zero
        if by_k:
            pivot = bisect(row, divisor, top, unit, first, last, keys, tokens, weights, fits, size, zero, pivot, high, zero,
                           k.to(tl.float64), 0, BLOCK)  # fmt: skip
            if by_p:
                total = measure(row, divisor, top, unit, first, last, keys, tokens, weights, fits, size, zero, pivot, 1,
                                BLOCK)  # fmt: skip
        else:
            part = tl.arange(0, SPLITS)
            slot = masses + (request * splits + part) * 2
            total += tl.sum(tl.load(slot, mask=part < splits, other=0), 0)
            above += tl.sum(tl.load(slot + 1, mask=part < splits, other=0), 0)
        if by_p:
            wanted = p * total.to(tl.float64)
            pivot = bisect(row, divisor, top, unit, first, last, keys, tokens, weights, fits, size, zero, pivot, high, above,
                           wanted, 1, BLOCK)  # fmt: skip
            greater = above + measure(row, divisor, top, unit, first, last, keys, tokens, weights, fits, size, zero,
                                      pivot + 1, 1, BLOCK)  # fmt: skip
            equals = measure(row, divisor, top, unit, first, last, keys, tokens, weights, fits, size, pivot,
                             zero - 2147483647, 2, BLOCK)  # fmt: skip
            share = weights_of(values_of(pivot.to(tl.int32)), top, unit).to(tl.float64)
            room = tl.maximum(tl.ceil((wanted - greater.to(tl.float64)) / tl.maximum(share, 1.0)), 1.0)
            if room < equals.to(tl.float64):
                last_id = 0 - bisect(row, divisor, top, unit, first, last, keys, tokens, weights, fits, size, pivot,
                                     zero - v + 1, zero, zero, room, 2, BLOCK)  # fmt: skip
    tl.store(pivots + 2 * request, pivot.to(tl.int32))
    tl.store(pivots + 2 * request + 1, last_id.to(tl.int32))
