"""Sampling in Triton: small kernels over [requests, parts of a row], so that one request uses the whole device.

    peaks    the largest logit of each group of tokens, the only pass over every row
    bound    the largest of a row; the token of a greedy one; for a small top_k, a bound of its threshold from the peaks
    count    a histogram of the distance from the largest in 256 ranges (top_p alone, and large top_k)
    bracket  the ranges in which the threshold can lie; both again for rows that have too many candidates left
    gather   the candidates as a list, and the exact mass above them
    search   bisection for the exact thresholds in registers, one program per request; the draw too if all survivors are listed
    draw     each part's best noisy survivor
    pick     the best of the parts

Counts are integers and probabilities are integers of `unit`ths, so no result depends on how a row is split or in which
order it is summed or listed. Histograms and peaks only bracket a threshold (masses are bounds, by the edges of a range); what
is inside the bracket is decided exactly. Noise is needed for survivors only, and float64 noise only for those whose float32
noise comes within its error of the best: one or two a part. Bounding first and deciding on few is also how FlashInfer and
vLLM's Triton filter avoid the sort; they bound by pivots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase
from gristmill.kernels.sampling._philox_triton import gumbel, rough_gumbel
from gristmill.kernels.sampling._sample_search import (
    LEAST,
    all_listed,
    bracket_kernel,
    count_kernel,
    filters_of,
    gather_kernel,
    keys_of,
    scaled,
    search_list,
    search_row,
    values_of,
)
from gristmill.kernels.sampling.sample_triton import LISTED, carve, group_of

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
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


@triton.jit
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
    found,
    ids,
    stride,
    v,
    groups,
    few,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """tops [requests]: the largest scaled logit, NaN for rows that need no more: greedy ones, and those without an answer.

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
        held = tl.sum((key >= least).to(tl.int32), 0)
        # Near enough is enough: the list is searched exactly.
        while (least < high) & (held > k + k // 2 + 8):
            middle = high - ((high - least) >> 1)
            reached = tl.sum((key >= middle).to(tl.int32), 0)
            enough = reached >= k
            least = tl.where(enough, middle, least)
            held = tl.where(enough, reached, held)
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
    tl.store(found + request, 0)


@triton.jit
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


@triton.jit
def floor_of(min_ps, request):
    """(min_p, a bound of z - top under which it surely bars); a float64 test decides the rest."""
    floor = tl.load(min_ps + request).to(tl.float64)
    return floor, tl.where(floor > 0.0, tl.log(tl.where(floor > 0.0, floor, 1.0)) - 1e-3, float("-inf")).to(
        tl.float32
    )


@triton.jit
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
@triton.jit(do_not_specialize=["v"])  # type: ignore[call-arg, untyped-decorator]
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
    found,
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
        count = tl.load(found + request)
        keys += request * listed
        tokens += request * listed
        scores += request * splits
        winners += request * splits
        fits, draws = all_listed(brackets, found, request, listed)
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


@triton.jit
def draw_kernel(
    logits,
    temperatures,
    min_ps,
    seeds,
    indices,
    maxima,
    tops,
    brackets,
    found,
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
    _, drawn = all_listed(brackets, found, request, listed)
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


@triton.jit
def pick_kernel(tops, brackets, found, scores, winners, ids, splits, listed, SPLITS: tl.constexpr):
    """The best of the parts, or of the one list."""
    request = tl.program_id(0).to(tl.int64)
    top = tl.load(tops + request)
    if top == top:
        _, drawn = all_listed(brackets, found, request, listed)
        part = tl.arange(0, SPLITS)
        inside = part < tl.where(drawn, 1, splits)
        score = tl.load(scores + request * splits + part, mask=inside, other=float("-inf"))
        place = tl.load(winners + request * splits + part, mask=inside, other=2147483647)
        winner = tl.min(tl.where(score == tl.max(score, 0), place, 2147483647), 0)
        # A min_p above 1 bars every token; all are then equally impossible, and the first of equals is the answer.
        tl.store(ids + request, tl.where(winner == 2147483647, 0, winner).to(tl.int64))


def launch(
    config: Config,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    index: Tensor,
    workspace: Tensor | None,
    ids: Tensor,
) -> None:
    """logits [B, V] -> ids [B]. No synchronisation: which rows are filtered is read on the device."""
    rows, v = logits.shape
    if not rows:
        return
    block, splits, warps = int(config["block"]), int(config["splits"]), int(config["warps"])
    chunk = cdiv(v, splits * block) * block
    space = carve(workspace, logits, rows, v, splits)
    (
        maxima,
        tops,
        hot_groups,
        hot,
        brackets,
        found,
        histograms,
        masses,
        pivots,
        scores,
        winners,
        keys,
        tokens,
    ) = space
    listed, stride = min(v, LISTED), logits.stride(0)
    padded = 64 if splits <= 64 else triton.next_power_of_2(splits)  # one compilation for most batch sizes
    group = group_of(v)
    groups = cdiv(v, group)
    few = groups // 2
    unit = float(2 ** min(52, 62 - v.bit_length()))
    long = triton.next_power_of_2(listed)
    grid, each = (rows, splits), (rows,)
    tiles: dict[str, int] = {"BLOCK": block, "num_warps": warps}
    thresholds = (top_k, top_p)
    peaks_kernel[grid](logits, temperature, maxima, stride, v, chunk, groups, GROUP=group, **tiles)
    bound_kernel[each](
        logits,
        temperature,
        *thresholds,
        maxima,
        tops,
        hot_groups,
        hot,
        brackets,
        found,
        ids,
        stride,
        v,
        groups,
        few,
        GROUP=group,
        GROUPS=triton.next_power_of_2(groups),
        num_warps=4,
    )
    for again in (False, True):
        count_kernel[grid](
            logits,
            temperature,
            *thresholds,
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
            AGAIN=again,
            **tiles,
        )
        bracket_kernel[each](
            *thresholds,
            tops,
            brackets,
            histograms,
            masses,
            v,
            splits,
            few,
            listed,
            unit,
            AGAIN=again,
            SPLITS=padded,
            num_warps=4,
        )
    gather_kernel[grid](
        logits,
        temperature,
        *thresholds,
        maxima,
        tops,
        hot_groups,
        hot,
        brackets,
        found,
        masses,
        keys,
        tokens,
        stride,
        v,
        groups,
        few,
        listed,
        unit,
        GROUP=group,
        **tiles,
    )
    search_kernel[each](
        logits,
        temperature,
        *thresholds,
        min_p,
        seed,
        index,
        tops,
        brackets,
        found,
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
        SPLITS=padded,
        SHORT=min(long, 1024),
        LIST=long,
        BLOCK=config["search"],
        num_warps=config["search_warps"],
    )
    draw_kernel[grid](
        logits,
        temperature,
        min_p,
        seed,
        index,
        maxima,
        tops,
        brackets,
        found,
        pivots,
        scores,
        winners,
        stride,
        v,
        chunk,
        groups,
        listed,
        GROUP=group,
        **tiles,
    )
    pick_kernel[each](tops, brackets, found, scores, winners, ids, splits, listed, SPLITS=padded, num_warps=1)


_POINTERS = {
    "logits": "*bf16",
    "temperatures": "*fp32",
    "top_ks": "*i32",
    "top_ps": "*fp32",
    "min_ps": "*fp32",
    "seeds": "*i64",
    "indices": "*i64",
    "ids": "*i64",
    "maxima": "*fp32",
    "tops": "*fp32",
    "hot_groups": "*i32",
    "hot": "*i32",
    "brackets": "*i32",
    "found": "*i32",
    "histograms": "*i32",
    "masses": "*i64",
    "keys": "*i32",
    "tokens": "*i32",
    "pivots": "*i32",
    "scores": "*fp64",
    "winners": "*i32",
    "stride": "i32",
    "v": "i32",
    "chunk": "i32",
    "splits": "i32",
    "groups": "i32",
    "few": "i32",
    "listed": "i32",
    "unit": "fp32",
}
_CONSTANTS = {"SPLITS": 64, "BLOCK": 2048, "GROUP": 64, "GROUPS": 2048, "SHORT": 1024, "LIST": 8192}


def aot(target: Target) -> list[AotCase]:
    """What the compile matrix builds: each kernel at the sizes of 64 requests, and what reads logits for float32 too."""
    found = []
    for function, warps in (
        (peaks_kernel, 4),
        (bound_kernel, 4),
        (count_kernel, 4),
        (bracket_kernel, 4),
        (gather_kernel, 4),
        (search_kernel, 16),
        (draw_kernel, 4),
        (pick_kernel, 1),
    ):
        for again in (False, True) if "AGAIN" in function.arg_names else (False,):
            name = function.__name__.removesuffix("_kernel") + ("-again" if again else "")
            constants = {
                key: value
                for key, value in (_CONSTANTS | {"AGAIN": again}).items()
                if key in function.arg_names
            }
            types = {key: _POINTERS[key] for key in function.arg_names if key not in constants}
            for x in ("bf16", "fp32") if "logits" in types else ("",):
                chosen = types | ({"logits": f"*{x}"} if x else {})
                found.append(
                    AotCase(f"{name}-{x}" if x else name, function, chosen, constants, {"num_warps": warps})
                )
    return found
