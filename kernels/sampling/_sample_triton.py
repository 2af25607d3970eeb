"""Sampling in Triton: seven small kernels over [requests, parts of a row], so that one request uses the whole device.

    stats    the largest scaled logit, its token, and faults, of each part
    count    a histogram of the distance from the largest, in 256 ranges (filtered rows only, as the next three)
    bracket  the ranges in which the thresholds of top_k and top_p can lie, and where each part's candidates are listed
    gather   the candidates as a list, and the exact mass above them
    search   bisection for the exact thresholds over the list, one program a request
    draw     each part's best noisy survivor
    pick     the best of the parts

Counts are integers and probabilities are integers of `unit`ths, so no result depends on how a row is split or in which
order it is summed. The histogram only brackets a threshold (its masses are bounds, by the edges of a range); what is
inside the bracket is decided exactly. Noise is needed for survivors only, and float64 noise only for those whose float32
noise comes within its error of the best: one or two a part. Bounding first and deciding on few is also how FlashInfer and
vLLM's Triton filter avoid the sort; they bound by pivots.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase
from gristmill.kernels.sampling._philox_triton import gumbel, rough_gumbel
from gristmill.kernels.sampling._sample_search import (
    bracket_kernel,
    count_kernel,
    divisor_of,
    gather_kernel,
    keys_of,
    row_top,
    scaled,
    search_kernel,
)
from gristmill.kernels.sampling.sample_triton import LISTED, carve


@triton.jit
def stats_kernel(logits, temperatures, maxima, places, faults, stride, v, chunk, BLOCK: tl.constexpr):
    request, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = logits + request * stride
    divisor, _ = divisor_of(temperatures, request)
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.full([BLOCK], 2147483647, tl.int32)
    wrong = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(split * chunk, tl.minimum(split * chunk + chunk, v), BLOCK):
        place = start + tl.arange(0, BLOCK)
        z = scaled(row, place, place < v, divisor)
        wrong = tl.where((z != z) | (z == float("inf")), 1, wrong)
        better = z > most
        most = tl.where(better, z, most)
        where = tl.where(better, place, where)
    highest = tl.max(most, 0)
    slot = request * tl.num_programs(1) + split
    tl.store(maxima + slot, highest)
    tl.store(places + slot, tl.min(tl.where(most == highest, where, 2147483647), 0))
    tl.store(faults + slot, tl.max(wrong, 0))


@triton.jit
def draw_kernel(
    logits, temperatures, min_ps, seeds, indices, maxima, faults, pivots, scores, winners, stride, v, chunk,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row = logits + request * stride
    divisor, greedy = divisor_of(temperatures, request)
    top, valid = row_top(maxima, faults, request, splits, SPLITS)
    top64 = top.to(tl.float64)
    best = top64 * 0.0 + float("-inf")
    chosen = split * 0 + 2147483647
    if valid & (greedy == 0):
        pivot = tl.load(pivots + 2 * request)
        last = tl.load(pivots + 2 * request + 1)
        floor = tl.load(min_ps + request).to(tl.float64)
        # What min_p surely bars; the float64 test below decides the rest.
        limit = tl.where(floor > 0.0, tl.log(tl.where(floor > 0.0, floor, 1.0)) - 1e-3, float("-inf")).to(tl.float32)
        seed = tl.load(seeds + request)
        index = tl.load(indices + request)
        for start in range(split * chunk, tl.minimum(split * chunk + chunk, v), BLOCK):
            place = start + tl.arange(0, BLOCK)
            z = scaled(row, place, place < v, divisor)
            key = keys_of(z)
            keep = (z > float("-inf")) & ((key > pivot) | ((key == pivot) & (place <= last))) & (z - top >= limit)
            if tl.max(keep.to(tl.int32), 0) > 0:
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
    tl.store(scores + request * splits + split, best)
    tl.store(winners + request * splits + split, chosen)


@triton.jit
def pick_kernel(temperatures, maxima, places, faults, scores, winners, ids, splits, SPLITS: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    _, greedy = divisor_of(temperatures, request)
    top, valid = row_top(maxima, faults, request, splits, SPLITS)
    part = tl.arange(0, SPLITS)
    slot = request * splits + part
    if greedy:
        same = tl.load(maxima + slot, mask=part < splits, other=float("-inf")) == top
        place = tl.load(places + slot, mask=part < splits, other=2147483647)
    else:
        score = tl.load(scores + slot, mask=part < splits, other=float("-inf"))
        same = score == tl.max(score, 0)
        place = tl.load(winners + slot, mask=part < splits, other=2147483647)
    winner = tl.min(tl.where(same, place, 2147483647), 0)
    # A min_p above 1 bars every token; all are then equally impossible, and the first of equals is the answer.
    winner = tl.where(winner == 2147483647, 0, winner)
    tl.store(ids + request, tl.where(valid, winner, -1).to(tl.int64))


def launch(
    config: Config, logits: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, seed: Any, index: Any,
    workspace: Any, ids: Any,
) -> None:  # fmt: skip
    """logits [B, V] -> ids [B]. No synchronisation: which rows are filtered is read on the device."""
    rows, v = logits.shape
    if not rows:
        return
    block, splits, warps = int(config["block"]), int(config["splits"]), int(config["warps"])
    chunk = -(-v // (splits * block)) * block
    space = carve(workspace, logits, rows, v, splits)
    maxima, places, faults, histograms, offsets, brackets, masses, pivots, scores, winners, keys, tokens, weights = space
    listed, stride, padded = min(v, LISTED), logits.stride(0), triton.next_power_of_2(splits)
    unit = float(2 ** min(52, 62 - v.bit_length()))
    grid, each = (rows, splits), (rows,)
    wishes = (temperature, top_k, top_p)
    stats_kernel[grid](logits, temperature, maxima, places, faults, stride, v, chunk, BLOCK=block, num_warps=warps)
    count_kernel[grid](logits, *wishes, maxima, faults, histograms, stride, v, chunk, SPLITS=padded, BLOCK=block,
                       num_warps=warps)  # fmt: skip
    bracket_kernel[each](*wishes, maxima, faults, histograms, offsets, brackets, v, splits, SPLITS=padded, num_warps=4)
    gather_kernel[grid](logits, *wishes, maxima, faults, offsets, brackets, masses, keys, tokens, weights, stride, v, chunk,
                        listed, unit, SPLITS=padded, BLOCK=block, num_warps=warps)  # fmt: skip
    search_kernel[each](logits, *wishes, maxima, faults, brackets, masses, keys, tokens, weights, pivots, stride, v, splits,
                        listed, unit, SPLITS=padded, BLOCK=config["search"], num_warps=config["search_warps"])  # fmt: skip
    draw_kernel[grid](logits, temperature, min_p, seed, index, maxima, faults, pivots, scores, winners, stride, v, chunk,
                      SPLITS=padded, BLOCK=block, num_warps=warps)  # fmt: skip
    pick_kernel[each](temperature, maxima, places, faults, scores, winners, ids, splits, SPLITS=padded, num_warps=1)


_POINTERS = {
    "logits": "*bf16", "temperatures": "*fp32", "top_ks": "*i32", "top_ps": "*fp32", "min_ps": "*fp32", "seeds": "*i64",
    "indices": "*i64", "ids": "*i64", "maxima": "*fp32", "places": "*i32", "faults": "*i32", "histograms": "*i32",
    "offsets": "*i32", "brackets": "*i32", "masses": "*i64", "keys": "*i32", "tokens": "*i32", "weights": "*i64",
    "pivots": "*i32", "scores": "*fp64", "winners": "*i32",
    "stride": "i32", "v": "i32", "chunk": "i32", "splits": "i32", "listed": "i32", "unit": "fp32",
}  # fmt: skip


def aot(target: Target) -> list[AotCase]:
    """What the compile matrix builds: each kernel at the sizes of 64 requests, and what reads logits for float32 too."""
    found = []
    for function, block, warps in (
        (stats_kernel, 2048, 4), (count_kernel, 2048, 4), (bracket_kernel, 0, 4), (gather_kernel, 2048, 4),
        (search_kernel, 2048, 16), (draw_kernel, 2048, 4), (pick_kernel, 0, 1),
    ):  # fmt: skip
        name = function.__name__.removesuffix("_kernel")
        constants = {key: value for key, value in (("SPLITS", 32), ("BLOCK", block)) if key in function.arg_names}
        types = {key: _POINTERS[key] for key in function.arg_names if key not in constants}
        for x in ("bf16", "fp32") if "logits" in types else ("",):
            chosen = types | ({"logits": f"*{x}"} if x else {})
            found.append(AotCase(f"{name}-{x}" if x else name, function, chosen, constants, {"num_warps": warps}))
    return found
