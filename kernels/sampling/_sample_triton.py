"""The sampling kernels in Triton that bound a row and draw from it; `sample_triton` documents their order."""

from __future__ import annotations

from gristmill.kernels.lazy_triton import jit, tl
from gristmill.kernels.sampling._philox_triton import gumbel, rough_gumbel
from gristmill.kernels.sampling._sample_search import (
    LEAST,
    all_listed,
    filters_of,
    keys_of,
    scaled,
    search_list,
    search_row,
    values_of,
)


@jit
def peaks_kernel(
    logits, temperatures, maxima, stride, v, chunk, groups, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """maxima [requests, groups]: the largest logit of each group; +inf for one that spoils the row."""
    request, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = logits + request * stride
    # NaN and +inf are faults; -inf over an infinite temperature is NaN.
    bad = tl.where(tl.load(temperatures + request) == float("inf"), float("-inf"), float("inf"))
    for start in range(split * chunk, tl.minimum(split * chunk + chunk, v), BLOCK):
        group = start // GROUP + tl.arange(0, BLOCK // GROUP)
        place = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = tl.load(row + place, mask=place < v, other=float("-inf")).to(tl.float32)
        wrong = (x != x) | ((x == bad) & (place < v))
        tl.store(
            maxima + request * groups + group,
            tl.max(tl.where(wrong, float("inf"), x), 1),
            mask=group < groups,
        )


@jit
def bound_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    maxima,
    tops,
    hot_groups,
    hot,
    brackets,
    candidate_counts,
    ids,
    stride,
    v,
    groups,
    few,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """tops [requests]: the largest scaled logit, NaN for rows that are finished: greedy ones and invalid ones.

    With k groups whose peaks reach a value, at least k tokens do: the k-th largest is no smaller. That bounds the threshold
    of top_k, tightly as long as the largest tokens are in different groups. hot_groups [requests, groups]: those groups.
    """
    request = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + request)
    greedy = (temperature >= 1e-5) == 0
    divisor = tl.where(greedy, 1.0, temperature)
    group = tl.arange(0, GROUPS)
    peak = tl.load(maxima + request * groups + group, mask=group < groups, other=float("-inf"))
    most = tl.max(peak, 0)
    top = tl.div_rn(most, divisor)
    valid = (top > float("-inf")) & (top < float("inf"))
    if greedy | (valid == 0):
        first = tl.min(tl.where(peak == most, group, 2147483647), 0)
        place = first * GROUP + tl.arange(0, GROUP)
        x = tl.load(logits + request * stride + place, mask=place < v, other=float("-inf")).to(tl.float32)
        winner = tl.min(tl.where(x == most, place, 2147483647), 0)
        tl.store(ids + request, tl.where(valid, winner, -1).to(tl.int64))
    least = request * 0 + LEAST
    k, by_k, _, by_p = filters_of(top_ks, top_ps, request, v)
    if valid & (greedy == 0) & by_k & (k <= few):
        key = tl.where(group < groups, keys_of(tl.div_rn(peak, divisor)), -2147483648)
        high = keys_of(top).to(tl.int64)
        count = tl.sum((key >= least).to(tl.int32), 0)
        # An approximate bound suffices: the list is searched exactly.
        while (least < high) & (count > k + k // 2 + 8):
            middle = high - ((high - least) >> 1)
            reached = tl.sum((key >= middle).to(tl.int32), 0)
            enough = reached >= k
            least = tl.where(enough, middle, least)
            count = tl.where(enough, reached, count)
            high = tl.where(enough, high, middle - 1)
        reaches = key >= least
        slot = tl.cumsum(reaches.to(tl.int32), 0) - 1
        tl.store(hot_groups + request * groups + slot, group, mask=reaches)
        tl.store(hot + request, tl.sum(reaches.to(tl.int32), 0))
    tl.store(tops + request, tl.where(valid & (greedy == 0), top, float("nan")))
    tl.store(brackets + 3 * request, least.to(tl.int32))
    tl.store(brackets + 3 * request + 1, 2147483647)
    # Without filters nothing is listed.
    tl.store(brackets + 3 * request + 2, tl.where(by_k | by_p, 0, 2147483647))
    tl.store(candidate_counts + request, 0)


@jit
def best_of(z, keep, place, top64, floor, seed, index, best, chosen):
    """The best noisy token of a tile, if it beats (best, chosen)."""
    rough = tl.where(keep, z + rough_gumbel(seed, index, place), float("-inf"))
    highest = tl.max(rough, 0)
    # All whose rough score is within its error of the best: the best of them is exact. One or two, as a rule.
    while (highest > float("-inf")) & (highest + 1e-3 >= best - 1e-6 * tl.abs(best)):
        at = tl.min(tl.where(rough == highest, place, 2147483647), 0)
        exact = tl.max(tl.where(place == at, z, float("-inf")), 0).to(tl.float64)
        fits = ((floor > 0.0) == 0) | (tl.exp(exact - top64) >= floor)
        exact += gumbel(seed, index, at)
        better = fits & ((exact > best) | ((exact == best) & (at < chosen)))
        best = tl.where(better, exact, best)
        chosen = tl.where(better, at, chosen)
        rough = tl.where(place == at, float("-inf"), rough)
        highest = tl.max(rough, 0)
    return best, chosen


@jit
def floor_of(min_ps, request):
    """(min_p, a bound of z - top under which it surely bars); a float64 test decides the rest."""
    floor = tl.load(min_ps + request).to(tl.float64)
    return floor, tl.where(floor > 0.0, tl.log(tl.where(floor > 0.0, floor, 1.0)) - 1e-3, float("-inf")).to(
        tl.float32
    )


@jit
def settle(
    keys,
    tokens,
    count,
    v,
    top,
    unit,
    k,
    by_k,
    p,
    by_p,
    total,
    above,
    draws,
    min_ps,
    seeds,
    indices,
    request,
    scores,
    winners,
    LIST: tl.constexpr,
):
    """(pivot, last token of that key) from a list; if it has every survivor, also the draw."""
    slot = tl.arange(0, LIST)
    inside = slot < count
    key = tl.load(keys + slot, mask=inside, other=-2147483648)
    token = tl.load(tokens + slot, mask=inside, other=2147483647)
    pivot, last = search_list(key, token, inside, v, top, unit, k, by_k, p, by_p, total, above)
    if draws:
        z = tl.where(inside, values_of(key), float("-inf"))
        floor, limit = floor_of(min_ps, request)
        keep = inside & ((key > pivot) | ((key == pivot) & (token <= last))) & (z - top >= limit)
        best, chosen = best_of(
            z,
            keep,
            token,
            top.to(tl.float64),
            floor,
            tl.load(seeds + request),
            tl.load(indices + request),
            top.to(tl.float64) * 0.0 + float("-inf"),
            count * 0 + 2147483647,
        )
        tl.store(scores, best)
        tl.store(winners, chosen)
    return pivot, last


# A vocabulary of one token would become a constant, on which Triton 3.6 fails to compile.
@jit(do_not_specialize=["v", "splits"])  # type: ignore[call-arg, untyped-decorator]
def search_kernel(  # type: ignore[no-untyped-def]
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    indices,
    tops,
    brackets,
    candidate_counts,
    masses,
    keys,
    tokens,
    pivots,
    scores,
    winners,
    stride,
    v,
    splits,
    listed,
    unit,
    SPLITS: tl.constexpr,
    SHORT: tl.constexpr,
    LIST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """pivots [requests, 2]: tokens of a larger key survive, and those of this key up to this id. All, without filters."""
    request = tl.program_id(0).to(tl.int64)
    top = tl.load(tops + request)
    k, by_k, p, by_p = filters_of(top_ks, top_ps, request, v)
    pivot = request * 0 - 2147483648
    last = request * 0 + 2147483647
    if (top == top) & (by_k | by_p):
        total = request * 0
        above = request * 0
        if by_k == 0:
            part = tl.arange(0, SPLITS)
            slot = masses + (request * splits + part) * 2
            total += tl.sum(tl.load(slot, mask=part < splits, other=0), 0)
            above += tl.sum(tl.load(slot + 1, mask=part < splits, other=0), 0)
        count = tl.load(candidate_counts + request)
        keys += request * listed
        tokens += request * listed
        scores += request * splits
        winners += request * splits
        fits, draws = all_listed(brackets, candidate_counts, request, listed)
        if fits:
            if count <= SHORT:
                pivot, last = settle(
                    keys,
                    tokens,
                    count,
                    v,
                    top,
                    unit,
                    k,
                    by_k,
                    p,
                    by_p,
                    total,
                    above,
                    draws,
                    min_ps,
                    seeds,
                    indices,
                    request,
                    scores,
                    winners,
                    SHORT,
                )
            else:
                pivot, last = settle(
                    keys,
                    tokens,
                    count,
                    v,
                    top,
                    unit,
                    k,
                    by_k,
                    p,
                    by_p,
                    total,
                    above,
                    draws,
                    min_ps,
                    seeds,
                    indices,
                    request,
                    scores,
                    winners,
                    LIST,
                )
        else:
            least = tl.load(brackets + 3 * request)
            most = tl.load(brackets + 3 * request + 1)
            pivot, last = search_row(
                logits + request * stride,
                v,
                tl.load(temperatures + request),
                top,
                unit,
                least,
                most,
                k,
                by_k,
                p,
                by_p,
                total,
                above,
                BLOCK,
            )
    tl.store(pivots + 2 * request, pivot.to(tl.int32))
    tl.store(pivots + 2 * request + 1, last.to(tl.int32))


@jit
def draw_kernel(
    logits,
    temperatures,
    min_ps,
    seeds,
    indices,
    maxima,
    tops,
    brackets,
    candidate_counts,
    pivots,
    scores,
    winners,
    stride,
    v,
    chunk,
    groups,
    listed,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """scores, winners [requests, splits]: the best noisy survivor of each part. Tiles without a survivor are not read."""
    request, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row = logits + request * stride
    top = tl.load(tops + request)
    _, drawn = all_listed(brackets, candidate_counts, request, listed)
    if (top == top) & (drawn == 0):
        divisor = tl.load(temperatures + request)
        top64 = top.to(tl.float64)
        best = top64 * 0.0 + float("-inf")
        chosen = split * 0 + 2147483647
        pivot = tl.load(pivots + 2 * request)
        last = tl.load(pivots + 2 * request + 1)
        floor, limit = floor_of(min_ps, request)
        seed = tl.load(seeds + request)
        index = tl.load(indices + request)
        for start in range(split * chunk, tl.minimum(split * chunk + chunk, v), BLOCK):
            group = start // GROUP + tl.arange(0, BLOCK // GROUP)
            peak = tl.div_rn(
                tl.load(maxima + request * groups + group, mask=group < groups, other=float("-inf")), divisor
            )
            if tl.max(((keys_of(peak) >= pivot) & (peak - top >= limit)).to(tl.int32), 0) > 0:
                place = start + tl.arange(0, BLOCK)
                z = scaled(row, place, place < v, divisor)
                key = keys_of(z)
                keep = (
                    (z > float("-inf"))
                    & ((key > pivot) | ((key == pivot) & (place <= last)))
                    & (z - top >= limit)
                )
                best, chosen = best_of(z, keep, place, top64, floor, seed, index, best, chosen)
        tl.store(scores + request * splits + split, best)
        tl.store(winners + request * splits + split, chosen)


@jit
def pick_kernel(tops, brackets, candidate_counts, scores, winners, ids, splits, listed, SPLITS: tl.constexpr):
    """The best of the parts, or of the one list."""
    request = tl.program_id(0).to(tl.int64)
    top = tl.load(tops + request)
    if top == top:
        _, drawn = all_listed(brackets, candidate_counts, request, listed)
        part = tl.arange(0, SPLITS)
        inside = part < tl.where(drawn, 1, splits)
        score = tl.load(scores + request * splits + part, mask=inside, other=float("-inf"))
        place = tl.load(winners + request * splits + part, mask=inside, other=2147483647)
        winner = tl.min(tl.where(score == tl.max(score, 0), place, 2147483647), 0)
        # A min_p above 1 bars every token; all are then equally impossible, and the first of equals is the answer.
        tl.store(ids + request, tl.where(winner == 2147483647, 0, winner).to(tl.int64))
