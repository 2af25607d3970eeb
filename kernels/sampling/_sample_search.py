"""The filters of sampling in Triton: from a row to the pivot (key, last token) above which everything survives."""

from __future__ import annotations

from gristmill.kernels.lazy_triton import constexpr, jit, tl

BINS = constexpr(256)
DEEPEST = constexpr(24.0)
"""The range of the first histogram: distances from the largest scaled logit up to 24, e^-24 of its probability."""
LEAST = constexpr(-2139095040)
"""The key just above that of -inf."""


@jit
def scaled(row, place, inside, divisor):
    """Logits over temperature, float32 with IEEE division; -inf outside."""
    x = tl.load(row + place, mask=inside, other=float("-inf")).to(tl.float32)
    # The division takes a slow path for all of a warp when one lane has an infinity.
    barred = x == float("-inf")
    return tl.where(barred, float("-inf"), tl.div_rn(tl.where(barred, 1.0, x), divisor))


@jit
def keys_of(z):
    """int32 in the order of float32; -0 counts as 0."""
    bits = tl.where(z == 0, 0.0, z).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@jit
def values_of(key):
    """The float32 of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@jit
def weights_of(z, top, unit):
    """exp(z - top) as an integer number of `unit`ths, in float64: sums of them are exact."""
    return (tl.exp(z.to(tl.float64) - top.to(tl.float64)) * unit + 0.5).to(tl.int64)


@jit
def filters_of(top_ks, top_ps, request, v):
    """(k, whether top_k is on, p, whether top_p is on)."""
    k = tl.load(top_ks + request)
    p = tl.load(top_ps + request)
    return k, (k > 0) & (k < v), tl.maximum(p, 0.0).to(tl.float64), p < 1.0


@jit
def frame_of(brackets, request, top):
    """(least key, largest key, z where the histogram starts, the width of its ranges) of the bracket that contains the threshold."""
    least = tl.load(brackets + 3 * request)
    most = tl.load(brackets + 3 * request + 1)
    anchor = tl.minimum(top, tl.where(most == 2147483647, float("inf"), values_of(most)))
    width = tl.maximum(tl.minimum((anchor - values_of(least)) / BINS, DEEPEST / BINS), 1e-30)
    return least, most, anchor, width


@jit
def count_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    tops,
    brackets,
    histograms,
    masses,
    stride,
    v,
    chunk,
    few,
    listed,
    unit,
    SECOND_PASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """histograms [requests, splits, 256]: tokens of each range of the bracket.

    The second time, for rows that still have more candidates than the list holds, also masses [requests, splits, 2]: of all
    tokens, and of those above the bracket.
    """
    request, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row = logits + request * stride
    top = tl.load(tops + request)
    k, by_k, _, by_p = filters_of(top_ks, top_ps, request, v)
    if SECOND_PASS:
        needed = (by_k == 0) & by_p & (tl.load(brackets + 3 * request + 2) > listed)
    else:
        needed = (by_k & (k > few)) | ((by_k == 0) & by_p)
    if (top == top) & needed:
        divisor = tl.load(temperatures + request)
        least, most, anchor, width = frame_of(brackets, request, top)
        counts = tl.zeros([BINS], dtype=tl.int32)
        total = request * 0
        above = request * 0
        for start in range(split * chunk, tl.minimum(split * chunk + chunk, v), BLOCK):
            place = start + tl.arange(0, BLOCK)
            if SECOND_PASS:
                z = scaled(row, place, place < v, divisor)
                key = keys_of(z)
                inside = (key >= least) & (key <= most)
            else:
                # An approximate product suffices: brackets have a margin.
                z = tl.load(row + place, mask=place < v, other=float("-inf")).to(tl.float32) * (1.0 / divisor)
                inside = z > float("-inf")
            bin_index = tl.minimum((anchor - z) * (1.0 / width), BINS - 1.0).to(tl.int32)
            counts += tl.histogram(tl.maximum(bin_index, 0), BINS, mask=inside)
            if SECOND_PASS:
                weight = weights_of(z, top, unit)
                total += tl.sum(weight, 0)
                above += tl.sum(tl.where(key > most, weight, 0), 0)
        slot = request * splits + split
        tl.store(histograms + slot * BINS + tl.arange(0, BINS), counts)
        if SECOND_PASS:
            tl.store(masses + slot * 2, total)
            tl.store(masses + slot * 2 + 1, above)


@jit
def bracket_kernel(
    top_ks,
    top_ps,
    tops,
    brackets,
    histograms,
    masses,
    v,
    splits,
    few,
    listed,
    unit,
    SECOND_PASS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """brackets [requests, 3]: the keys between which candidates lie, and how many there are.

    With top_k the candidates are all from its threshold's range up. With top_p alone they are the ranges that the pivot
    can be in: with A the mass down to a range and R the rest, it is the first range with A (1 - p) >= R p, and the edges of
    ranges bound A and R from both sides. The second time the mass above the bracket and that of the row are exact.
    """
    request = tl.program_id(0).to(tl.int64)
    top = tl.load(tops + request)
    k, by_k, p, by_p = filters_of(top_ks, top_ps, request, v)
    if SECOND_PASS:
        needed = (by_k == 0) & by_p & (tl.load(brackets + 3 * request + 2) > listed)
    else:
        needed = (by_k & (k > few)) | ((by_k == 0) & by_p)
    if (top == top) & needed:
        least, most, anchor, width = frame_of(brackets, request, top)
        bins = tl.arange(0, BINS)
        rows = tl.arange(0, 8)
        counts = tl.zeros([BINS], dtype=tl.int32)
        for start in range(0, splits, 8):
            part = (start + rows)[:, None]
            at = histograms + (request * splits + part) * BINS + bins[None, :]
            counts += tl.sum(tl.load(at, mask=part < splits, other=0), 0)
        start_z = anchor.to(tl.float64)
        # A thousandth of a range: far above the float32 rounding of distances. The first time also that of the product.
        margin = width.to(tl.float64) * 1e-3
        if not SECOND_PASS:
            margin += 1e-6 * (tl.abs(start_z) + DEEPEST)
        near = bins.to(tl.float64) * width.to(tl.float64) - margin
        far = (bins.to(tl.float64) + 1.0) * width.to(tl.float64) + margin
        first = request * 0
        if by_k:
            last = tl.minimum(tl.sum((tl.cumsum(counts, 0) < k).to(tl.int64), 0), BINS - 1)
        else:
            tokens = counts.to(tl.float64) * unit
            heavy = tokens * tl.exp(start_z - near - top.to(tl.float64))
            light = tl.where(bins < BINS - 1, tokens * tl.exp(start_z - far - top.to(tl.float64)), 0.0)
            largest, smallest = tl.cumsum(heavy, 0), tl.cumsum(light, 0)
            if SECOND_PASS:
                slot = masses + (request * splits + tl.arange(0, SPLITS)) * 2
                inside = tl.arange(0, SPLITS) < splits
                target = p * tl.sum(tl.load(slot, mask=inside, other=0), 0).to(tl.float64)
                above = tl.sum(tl.load(slot + 1, mask=inside, other=0), 0).to(tl.float64)
                # Each weight is rounded to a unit.
                slack = tl.cumsum(counts, 0).to(tl.float64) + 1e-9 * target + 1.0
                possible = above + largest + slack >= target
                certain = above + smallest - slack >= target
            else:
                possible = largest * (1.0 - p) >= p * (tl.sum(light, 0) - smallest)
                certain = smallest * (1.0 - p) >= p * (tl.sum(heavy, 0) - largest)
            first = tl.minimum(tl.sum((possible == 0).to(tl.int64), 0), BINS - 1)
            last = tl.minimum(tl.sum((certain == 0).to(tl.int64), 0), BINS - 1)
        if not SECOND_PASS:
            # If all survivors fit in the list, the search can draw.
            first = tl.where(tl.sum(tl.where(bins <= last, counts, 0), 0) <= listed, 0, first)
        if first > 0:
            edge = tl.sum(tl.where(bins == first, start_z - near, 0.0), 0)
            most = tl.minimum(most, keys_of(edge.to(tl.float32)) + 1)
        if last < BINS - 1:
            edge = tl.sum(tl.where(bins == last, start_z - far, 0.0), 0)
            least = tl.maximum(least, keys_of(edge.to(tl.float32)) - 1)
        tl.store(brackets + 3 * request, least)
        tl.store(brackets + 3 * request + 1, most)
        tl.store(brackets + 3 * request + 2, tl.sum(tl.where((bins >= first) & (bins <= last), counts, 0), 0))


@jit
def gather_kernel(
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
    masses,
    keys,
    tokens,
    stride,
    v,
    groups,
    few,
    listed,
    unit,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """keys, tokens [requests, listed]: the candidates in no order, where they fit; candidate_counts [requests]: how many there are.

    masses as in `count_kernel`, for top_p without top_k. Only groups with a candidate are read, unless for their mass.
    """
    request, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row = logits + request * stride
    top = tl.load(tops + request)
    k, by_k, _, by_p = filters_of(top_ks, top_ps, request, v)
    if (top == top) & (by_k | by_p):
        divisor = tl.load(temperatures + request)
        least = tl.load(brackets + 3 * request)
        most = tl.load(brackets + 3 * request + 1)
        fits = tl.load(brackets + 3 * request + 2) <= listed
        bounded = by_k & (k <= few)
        all_groups = by_k == 0
        end = groups
        if bounded:
            end = tl.load(hot + request)
        total = request * 0
        above = request * 0
        ROWS: tl.constexpr = BLOCK // GROUP
        for start in range(split * ROWS, end, splits * ROWS):
            at = start + tl.arange(0, ROWS)
            group = at
            if bounded:
                group = tl.load(hot_groups + request * groups + at, mask=at < end, other=0)
            peak = tl.load(maxima + request * groups + group, mask=at < end, other=float("-inf"))
            may_hold = (at < end) & (
                keys_of(tl.div_rn(peak, divisor)) >= tl.where(all_groups, -2147483648, least)
            )
            if all_groups | (fits & (tl.max(may_hold.to(tl.int32), 0) > 0)):
                place = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
                z = scaled(row, place, (place < v) & may_hold[:, None], divisor)
                key = keys_of(z)
                if all_groups:
                    weight = weights_of(z, top, unit)
                    total += tl.sum(tl.sum(weight, 1), 0)
                    if most < 2147483647:
                        above += tl.sum(tl.sum(tl.where(key > most, weight, 0), 1), 0)
                candidate = (key >= least) & (key <= most)
                in_group = tl.sum(candidate.to(tl.int32), 1)
                count = tl.sum(in_group, 0)
                if fits & (count > 0):
                    first_slot = tl.atomic_add(candidate_counts + request, count)
                    slot = (
                        first_slot
                        + (tl.cumsum(in_group, 0) - in_group)[:, None]
                        + tl.cumsum(candidate.to(tl.int32), 1)
                        - 1
                    )
                    has_slot = candidate & (slot < listed)
                    tl.store(keys + request * listed + slot, key, mask=has_slot)
                    tl.store(tokens + request * listed + slot, place, mask=has_slot)
        tl.store(masses + (request * splits + split) * 2, total)
        tl.store(masses + (request * splits + split) * 2 + 1, above)


@jit
def all_listed(brackets, candidate_counts, request, listed):
    """(whether a row's candidates are all in its list, whether all its survivors are)."""
    listed_all = (tl.load(brackets + 3 * request + 2) <= listed) & (
        tl.load(candidate_counts + request) <= listed
    )
    return listed_all, listed_all & (tl.load(brackets + 3 * request + 1) == 2147483647)


@jit
def measure(row, v, divisor, top, unit, least, most, pivot, at, MODE: tl.constexpr, BLOCK: tl.constexpr):
    """Over the candidates of a row: 0, how many have key >= at; 1, their mass; 2, how many of key `pivot` have an id <= -at;
    3, the smallest key; 4, the largest."""
    result = at * 0
    if MODE == 3:
        result += 2147483647
    if MODE == 4:
        result += -2147483648
    for start in range(0, v, BLOCK):
        place = start + tl.arange(0, BLOCK)
        z = scaled(row, place, place < v, divisor)
        key = keys_of(z)
        inside = (place < v) & (key >= least) & (key <= most)
        if MODE == 0:
            result += tl.sum((inside & (key >= at)).to(tl.int32), 0)
        if MODE == 1:
            result += tl.sum(tl.where(inside & (key >= at), weights_of(z, top, unit), 0), 0)
        if MODE == 2:
            result += tl.sum((inside & (key == pivot) & (place <= -at)).to(tl.int32), 0)
        if MODE == 3:
            result = tl.minimum(result, tl.min(tl.where(inside, key, 2147483647), 0).to(tl.int64))
        if MODE == 4:
            result = tl.maximum(result, tl.max(tl.where(inside, key, -2147483648), 0).to(tl.int64))
    return result


@jit
def bisect(
    row,
    v,
    divisor,
    top,
    unit,
    least,
    most,
    pivot,
    low,
    high,
    base,
    target,
    MODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest t in [low, high] with base + measure(t) >= target, given that low has it."""
    while low < high:
        middle = high - ((high - low) >> 1)
        reached = base + measure(row, v, divisor, top, unit, least, most, pivot, middle, MODE, BLOCK)
        enough = reached.to(tl.float64) >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@jit
def search_row(row, v, divisor, top, unit, least, most, k, by_k, p, by_p, total, above, BLOCK: tl.constexpr):
    """(pivot, last token of that key) of a row whose candidates do not fit in the list: many passes over the row."""
    zero = total * 0
    last = zero + 2147483647
    pivot = measure(row, v, divisor, top, unit, least, most, zero, zero, 3, BLOCK)
    high = measure(row, v, divisor, top, unit, least, most, zero, zero, 4, BLOCK)
    if by_k:
        pivot = bisect(
            row, v, divisor, top, unit, least, most, zero, pivot, high, zero, k.to(tl.float64), 0, BLOCK
        )
        total = zero
        if by_p:
            total = measure(row, v, divisor, top, unit, least, most, zero, pivot, 1, BLOCK)
    if by_p:
        target = p * total.to(tl.float64)
        pivot = bisect(row, v, divisor, top, unit, least, most, zero, pivot, high, above, target, 1, BLOCK)
        greater = above + measure(row, v, divisor, top, unit, least, most, zero, pivot + 1, 1, BLOCK)
        equals = measure(row, v, divisor, top, unit, least, most, pivot, zero - 2147483647, 2, BLOCK)
        share = weights_of(values_of(pivot.to(tl.int32)), top, unit).to(tl.float64)
        room = tl.maximum(tl.ceil((target - greater.to(tl.float64)) / tl.maximum(share, 1.0)), 1.0)
        if room < equals.to(tl.float64):
            last = 0 - bisect(
                row, v, divisor, top, unit, least, most, pivot, zero - v + 1, zero, zero, room, 2, BLOCK
            )
    return pivot, last


@jit
def narrow(key, inside, middle, low, high, enough):
    """One half of [low, high], narrowed to keys that occur: the number of steps depends on the different keys, not on their bits."""
    if enough:
        low = tl.min(tl.where(inside & (key >= middle), key, 2147483647), 0).to(tl.int64)
    else:
        high = tl.max(tl.where(inside & (key < middle), key, -2147483648), 0).to(tl.int64)
    return low, high


@jit
def search_list(key, token, inside, v, top, unit, k, by_k, p, by_p, total, above):
    """`search_row` for a list of candidates, which one program holds in registers."""
    zero = total * 0
    last = zero + 2147483647
    low = tl.min(tl.where(inside, key, 2147483647), 0).to(tl.int64)
    high = tl.max(tl.where(inside, key, -2147483648), 0).to(tl.int64)
    highest = high
    if by_k:
        while low < high:
            middle = high - ((high - low) >> 1)
            low, high = narrow(
                key, inside, middle, low, high, tl.sum((inside & (key >= middle)).to(tl.int32), 0) >= k
            )
    if by_p:
        weight = tl.where(inside, weights_of(tl.where(inside, values_of(key), top), top, unit), 0)
        if by_k:
            total = tl.sum(tl.where(key >= low, weight, 0), 0)
        target = p * total.to(tl.float64)
        high = highest
        while low < high:
            middle = high - ((high - low) >> 1)
            mass = above + tl.sum(tl.where(key >= middle, weight, 0), 0)
            low, high = narrow(key, inside, middle, low, high, mass.to(tl.float64) >= target)
        equal = inside & (key == low)
        greater = above + tl.sum(tl.where(key > low, weight, 0), 0)
        share = weights_of(values_of(low.to(tl.int32)), top, unit).to(tl.float64)
        room = tl.maximum(tl.ceil((target - greater.to(tl.float64)) / tl.maximum(share, 1.0)), 1.0)
        if room < tl.sum(equal.to(tl.int32), 0).to(tl.float64):
            start = zero
            last = zero + v - 1
            while start < last:
                middle = start + ((last - start) >> 1)
                enough = tl.sum((equal & (token <= middle)).to(tl.int32), 0).to(tl.float64) >= room
                last = tl.where(enough, middle, last)
                start = tl.where(enough, start, middle + 1)
    return low, last
