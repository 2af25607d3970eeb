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

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import cdiv, next_power_of_2
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase
from gristmill.kernels.lazy_triton import function_of
from gristmill.kernels.sampling._sample_search import bracket_kernel, count_kernel, gather_kernel
from gristmill.kernels.sampling._sample_triton import (
    bound_kernel,
    draw_kernel,
    peaks_kernel,
    pick_kernel,
    search_kernel,
)

if TYPE_CHECKING:
    from torch import Tensor

    from gristmill.kernels.calls import SampleCall

LISTED = 8192
"""Candidates of a row that have room in the workspace, and in the registers of one program; with more, the search reads the
row itself."""
LARGEST = 2**24
GROUPS = 2048
"""Groups of a row to aim at, whose largest logits are kept: one program holds them."""
PROGRAMS = 4096
"""Programs to aim at: a few for each multiprocessor of the largest devices."""
ALIGNMENT = 256


def accepts(problem: Problem) -> str | None:
    """Vocabularies whose probabilities sum exactly at a resolution of 2^-37, and whose positions fit in int32."""
    v = problem.integer("v")
    return None if v <= LARGEST else f"vocabularies of up to {LARGEST} tokens, got {v}"


def config(problem: Problem, target: Target) -> Config:
    """Rows in parts of whole blocks. What depends on the batch is speed alone: the results are the same for any split."""
    return _config(problem, 2048 if problem.integer("m") > 1 else 1024, 4)


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Blocks and warps."""
    return [_config(problem, block, warps) for block in (1024, 2048, 4096) for warps in (4, 8)]


def _config(problem: Problem, block: int, warps: int) -> Config:
    m, v = max(problem.integer("m"), 1), problem.integer("v")
    block = min(block, max(256, next_power_of_2(v)))
    return {
        "block": block,
        "warps": warps,
        "splits": min(cdiv(v, block), max(1, PROGRAMS // m), 1024),
        "search": 2048,
        "search_warps": 16,
    }


def group_of(v: int) -> int:
    """Tokens of a group: 64, or as many as leave about GROUPS groups; at most the smallest block."""
    return min(max(64, next_power_of_2(cdiv(v, GROUPS))), 1024)


def pieces(rows: int, v: int, splits: int) -> tuple[tuple[str, int], ...]:
    """(dtype, elements) of what the kernels leave for each other."""
    parts, listed = rows * splits, min(v, LISTED)
    return (
        ("float32", rows * cdiv(v, group_of(v))),
        ("float32", rows),  # largest of each group, of each row
        ("int32", rows * cdiv(v, group_of(v))),
        ("int32", rows),  # groups that top_k needs
        ("int32", rows * 3),
        ("int32", rows),
        ("int32", parts * 256),  # brackets, candidates found, histograms
        ("int64", parts * 2),
        ("int32", rows * 2),  # masses, pivots
        ("float64", parts),
        ("int32", parts),  # draw: score, token
        ("int32", rows * listed),
        ("int32", rows * listed),  # candidates: key, token
    )


def _sizes(rows: int, v: int, splits: int) -> list[int]:
    return [
        cdiv(count * (8 if "64" in dtype else 4), ALIGNMENT) * ALIGNMENT
        for dtype, count in pieces(rows, v, splits)
    ]


def workspace(problem: Problem, config: Config) -> Workspace:
    """Histograms and lists of candidates: at most 96 KiB per request, and 1 KiB per part."""
    return Workspace(sum(_sizes(problem.integer("m"), problem.integer("v"), int(config["splits"]))))


def carve(space: Tensor | None, like: Tensor, rows: int, v: int, splits: int) -> list[Tensor]:
    """The tensors of `pieces`, in the caller's workspace or, without one, in fresh memory.

    ValueError for a workspace that is too small, not contiguous, or on another device than `like`.
    """
    import torch

    sizes = _sizes(rows, v, splits)
    if space is None:
        space = torch.empty(sum(sizes), dtype=torch.uint8, device=like.device)
    if (
        space.device != like.device
        or not space.is_contiguous()
        or space.nbytes < sum(sizes)
        or space.data_ptr() % 16
    ):
        raise ValueError(
            f"sample: the workspace must be {sum(sizes)} contiguous bytes on {like.device}, 16-byte aligned, got "
            f"{space.nbytes} on {space.device}"
        )
    flat, tensors, start = space.view(-1).view(torch.uint8), [], 0
    for (dtype, count), size in zip(pieces(rows, v, splits), sizes, strict=True):
        tensors.append(flat[start : start + size].view(getattr(torch, dtype))[:count])
        start += size
    return tensors


def launch(config: Config, call: SampleCall) -> None:
    """logits [B, V] -> ids [B]. No synchronisation: which rows are filtered is read on the device."""
    rows, v = call.logits.shape
    if not rows:
        return
    block, splits, warps = int(config["block"]), int(config["splits"]), int(config["warps"])
    chunk = cdiv(v, splits * block) * block
    space = carve(call.workspace, call.logits, rows, v, splits)
    (
        maxima,
        tops,
        hot_groups,
        hot,
        brackets,
        candidate_counts,
        histograms,
        masses,
        pivots,
        scores,
        winners,
        keys,
        tokens,
    ) = space
    listed, stride = min(v, LISTED), call.logits.stride(0)
    padded = 64 if splits <= 64 else next_power_of_2(splits)  # one compilation for most batch sizes
    group = group_of(v)
    groups = cdiv(v, group)
    few = groups // 2
    unit = float(2 ** min(52, 62 - v.bit_length()))
    list_size = next_power_of_2(listed)
    grid, row_grid = (rows, splits), (rows,)
    tiles: dict[str, int] = {"BLOCK": block, "num_warps": warps}
    thresholds = (call.top_k, call.top_p)
    peaks_kernel[grid](call.logits, call.temperature, maxima, stride, v, chunk, groups, GROUP=group, **tiles)
    bound_kernel[row_grid](
        call.logits,
        call.temperature,
        *thresholds,
        maxima,
        tops,
        hot_groups,
        hot,
        brackets,
        candidate_counts,
        call.ids,
        stride,
        v,
        groups,
        few,
        GROUP=group,
        GROUPS=next_power_of_2(groups),
        num_warps=4,
    )
    for second_pass in (False, True):
        count_kernel[grid](
            call.logits,
            call.temperature,
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
            SECOND_PASS=second_pass,
            **tiles,
        )
        bracket_kernel[row_grid](
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
            SECOND_PASS=second_pass,
            SPLITS=padded,
            num_warps=4,
        )
    gather_kernel[grid](
        call.logits,
        call.temperature,
        *thresholds,
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
        GROUP=group,
        **tiles,
    )
    search_kernel[row_grid](
        call.logits,
        call.temperature,
        *thresholds,
        call.min_p,
        call.seed,
        call.index,
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
        SPLITS=max(256, padded),  # takes longest to compile
        SHORT=min(list_size, 1024),
        LIST=list_size,
        BLOCK=config["search"],
        num_warps=config["search_warps"],
    )
    draw_kernel[grid](
        call.logits,
        call.temperature,
        call.min_p,
        call.seed,
        call.index,
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
        GROUP=group,
        **tiles,
    )
    pick_kernel[row_grid](
        tops,
        brackets,
        candidate_counts,
        scores,
        winners,
        call.ids,
        splits,
        listed,
        SPLITS=padded,
        num_warps=1,
    )


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
    "candidate_counts": "*i32",
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
    cases = []
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
        names = function_of(function).arg_names
        for second_pass in (False, True) if "SECOND_PASS" in names else (False,):
            name = function_of(function).__name__.removesuffix("_kernel") + ("-again" if second_pass else "")
            constants = {
                key: value
                for key, value in (_CONSTANTS | {"SECOND_PASS": second_pass}).items()
                if key in names
            }
            types = {key: _POINTERS[key] for key in names if key not in constants}
            for x in ("bf16", "fp32") if "logits" in types else ("",):
                case_types = types | ({"logits": f"*{x}"} if x else {})
                cases.append(
                    AotCase(
                        f"{name}-{x}" if x else name, function, case_types, constants, {"num_warps": warps}
                    )
                )
    return cases


KERNEL = Kernel(
    op="sample",
    name="sample_triton",
    provider="gristmill",
    language="triton",
    target=f"{__name__}:launch",
    aot=f"{__name__}:aot",
    requires=Requirement(code="triton"),
    summary="rows in parts; bounds from group maxima or histograms, exact search among candidates; no sort",
    accepts=accepts,
    config=config,
    space=space,
    workspace=workspace,
    batch_invariant=True,
    priority=50,
)
