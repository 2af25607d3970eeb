"""Weight-only int4 linear in CUDA C++ for Hopper at M <= 16 (`_linear_w4a16_sm90.cu`), over w4_frag16_v1.

Limited by memory at M <= 4 and by decoding above; docs/performance/linear_weight_only.md has the measurements, and what
was tried. The sums of a cluster's CTAs meet in a fixed order: results are bitwise repeatable, and independent of the
other rows of the batch within one configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ctypes import c_int, c_int64, c_void_p
from functools import lru_cache
from math import log2
from typing import Any, NamedTuple

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.common import dtype_name, row_stride
from gristmill.kernels.native import check, cuda_function

LARGEST_M = 16
ARGUMENTS = (c_void_p, c_void_p, c_int64, *(c_void_p,) * 3, *(c_int,) * 13, c_void_p)
FLOAT16, BFLOAT16 = 1, 2
TYPES = {"fp16": FLOAT16, "bf16": BFLOAT16}


class Shape(NamedTuple):
    """A CTA: columns of x in eights, 16-row tiles a warp, tiles a slot, warps along N and K, slots of x, CTAs a multiprocessor."""

    nt: int
    rt: int
    slot: int
    wn: int
    wk: int
    nx: int
    ctas: int


SHAPES = tuple(
    Shape(*values)
    for values in (
        (1, 2, 2, 1, 8, 4, 2), (1, 2, 2, 1, 16, 4, 1), (1, 4, 4, 1, 8, 4, 2), (1, 8, 4, 1, 8, 4, 2), (1, 4, 4, 2, 4, 4, 2),
        (1, 4, 4, 1, 4, 4, 4), (1, 4, 4, 1, 16, 4, 1), (1, 4, 4, 1, 12, 4, 1), (1, 7, 7, 1, 4, 4, 4), (1, 8, 4, 1, 4, 4, 3),
        (2, 2, 2, 1, 8, 3, 2), (2, 4, 4, 1, 8, 3, 1), (2, 7, 7, 2, 4, 3, 1), (2, 8, 4, 2, 4, 3, 1), (2, 8, 4, 1, 4, 2, 2),
        (2, 8, 4, 2, 2, 3, 2), (2, 4, 4, 1, 4, 2, 3),
    )
)  # fmt: skip
"""The instances in `_linear_w4a16_sm90.cu` (GM_SHAPES)."""

SHARED_BYTES = 227 * 1024
_TILE_BYTES, _KEPT_BYTES, _MAX_DEPTH = 1056, 1024, 16
_COSTS = {
    1: (0.0865, 0.0791, 0.0988, 0.8579, 0.9834, 1.135, 1.0793, 0.0069),
    2: (0.129, 0.1286, 0.1943, 0.4529, 0.7789, 1.0421, 1.4271, 0.0),
}
"""Microseconds, by columns of x in eights, fitted to 702 measurements on an H200: a tile and a group of the busiest
scheduler; a tile and a group of one warp; the launch; a doubling of split; a wave; a row of x a group."""


def launch(
    config: Config, x: Any, weight: Any, bias: Any, residual: Any, silu_mul: bool, n: int, workspace: Any, out: Any
) -> None:
    """x [..., K] and the three tensors of w4_frag16_v1 -> out [..., N or N / 2]."""
    import torch

    tiles, scale_type, _ = weight
    k, rows = x.shape[-1], out.shape[-1] * (2 if silu_mul else 1)
    m = x.numel() // k
    if tiles.numel() != _ceil(rows, 16) * _ceil(k, 128) * _TILE_BYTES:
        raise ValueError(
            f"linear_w4a16_sm90: {tiles.numel()} bytes of tiles do not pack a [{rows}, {k}] weight in groups of 128"
        )
    if m == 0:
        return
    # The gate and its partner are rows of different CTAs, so silu_mul follows in torch.
    target = torch.empty(m, rows, dtype=x.dtype, device=x.device) if silu_mul else out
    device = x.get_device()
    code = cuda_function("gm_linear_w4a16_sm90", "sm_90a", ARGUMENTS)(
        target.data_ptr(), x.data_ptr(), row_stride(x), tiles.data_ptr(), None if bias is None else bias.data_ptr(),
        None if residual is None or silu_mul else residual.data_ptr(), m, rows, k, TYPES[dtype_name(x.dtype)],
        TYPES[dtype_name(scale_type.dtype)], config["nt"], config["rt"], config["wn"], config["wk"], config["split"],
        config["depth"], 1, device, torch.cuda.current_stream(device).cuda_stream,
    )  # fmt: skip
    check(code, "linear_w4a16_sm90")
    if silu_mul:
        from gristmill.kernels.linear._epilogue import finish

        finish(target.view(*x.shape[:-1], rows), None, residual, True, out)


def accepts(problem: Problem) -> str | None:
    """int4_g128 with half-precision activations of at most 16 rows."""
    scheme = QuantScheme.parse(problem.text("w"))
    if scheme.name != "int4_g128":
        return f"multiplies int4_g128, not {scheme}"
    if problem.text("x") not in TYPES:
        return f"takes fp16 or bf16 activations, not {problem.text('x')}"
    if problem["act_order"]:
        return "takes no act-order"
    if problem.integer("m") > LARGEST_M:
        return f"built for M <= {LARGEST_M}, not {problem.integer('m')}"
    if problem.integer("k") % 128:
        return f"needs K a multiple of 128, got {problem.integer('k')}"
    return None


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def shared_bytes(shape: Shape, m: int, k: int, split: int, depth: int) -> int:
    """Dynamic shared memory of a CTA, the same sum as in `_linear_w4a16_sm90.cu`."""
    warps, sub = shape.wn * shape.wk, _ceil(shape.rt, shape.slot)
    chunks = _ceil(_ceil(k // 128, split), shape.wk) * sub
    depth = min(max(min(depth, chunks) // sub * sub, sub), _MAX_DEPTH // sub * sub)
    rings = warps * depth * shape.slot * _TILE_BYTES + shape.wk * shape.nx * m * 256
    sums = warps * shape.rt * shape.nt * 512
    return max(rings, sums) + (shape.wn * shape.rt * shape.nt * 512 if split > 1 else 0)


def candidates(m: int, n: int, k: int) -> Iterator[tuple[Shape, int, int, int]]:
    """(shape, split, depth, shared bytes) that fit and leave no warp without work."""
    need = 1 if m <= 8 else 2
    groups, tiles = k // 128, _ceil(n, 16)
    for shape in SHAPES:
        if shape.nt != need:
            continue
        for split in (1, 2, 4, 8):
            if split > 1 and (groups < split * shape.wk or _ceil(tiles, shape.rt * shape.wn) * split > 4096):
                continue
            for depth in (1, 2, 3, 4):
                size = shared_bytes(shape, m, k, split, depth)
                if size + shape.wn * shape.wk * _MAX_DEPTH * 8 + _KEPT_BYTES <= SHARED_BYTES:
                    yield shape, split, depth, size


def microseconds(shape: Shape, split: int, depth: int, size: int, m: int, n: int, k: int, processors: int) -> float:
    """Expected time of one call: the busiest scheduler, the longest warp, or memory, and what each launch costs."""
    tile, group, warp_tile, warp_group, start, doubling, wave, row = _COSTS[shape.nt]
    warps = shape.wn * shape.wk
    steps = _ceil(_ceil(k // 128, split), shape.wk)
    ctas = _ceil(_ceil(n, 16), shape.rt * shape.wn) * split
    resident = max(1, min(shape.ctas, SHARED_BYTES // (size + 2 * _KEPT_BYTES)))
    usable = (
        processors if split <= 2 else processors * 10 // 11
    )  # whole clusters of 4 and 8 do not fill every cluster of SMs
    busiest = _ceil(ctas, usable)
    waves = _ceil(busiest, resident)
    work = busiest * warps / 4 * steps * (shape.rt * tile + group + row * m / shape.wn)
    latency = waves * steps * (shape.rt * warp_tile + warp_group)
    memory = n * k * 0.515625 / 4.3e6
    slowest: float = (work**6 + latency**6 + memory**6) ** (1 / 6)
    return slowest + start + doubling * log2(split) + wave * waves


def _config(shape: Shape, split: int, depth: int) -> dict[str, int]:
    return {"nt": shape.nt, "rt": shape.rt, "wn": shape.wn, "wk": shape.wk, "split": split, "depth": depth}


@lru_cache(maxsize=4096)
def _best(m: int, n: int, k: int, processors: int) -> tuple[Shape, int, int]:
    shape, split, depth, _ = min(
        candidates(m, n, k), key=lambda c: microseconds(c[0], c[1], c[2], c[3], m, n, k, processors)
    )
    return shape, split, depth


def config(problem: Problem, target: Target) -> Config:
    """The candidate that the cost model likes best."""
    m, n, k = (problem.integer(axis) for axis in "mnk")
    return _config(*_best(max(m, 1), n, k, target.multiprocessors or 132))


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """The candidates that the cost model likes best."""
    m, n, k = (problem.integer(axis) for axis in "mnk")
    processors = target.multiprocessors or 132
    ranked = sorted(candidates(max(m, 1), n, k), key=lambda c: microseconds(*c, max(m, 1), n, k, processors))
    return [_config(shape, split, depth) for shape, split, depth, _ in ranked[:24]]


def estimate(problem: Problem, target: Target) -> float | None:
    """Microseconds by the cost model, on a Hopper with HBM3e."""
    m, n, k = (problem.integer(axis) for axis in "mnk")
    processors = target.multiprocessors or 132
    shape, split, depth = _best(max(m, 1), n, k, processors)
    size = shared_bytes(shape, max(m, 1), k, split, depth)
    return microseconds(shape, split, depth, size, max(m, 1), n, k, processors)


KERNEL = Kernel(
    op="linear",
    name="linear_w4a16_sm90",
    provider="gristmill",
    language="cuda",
    target=f"{__name__}:launch",
    requires=Requirement(features=(frozenset({"wgmma", "tma"}),), vendors=("nvidia",), code="cuda:sm_90a"),
    summary="M <= 16: bulk copies into warps' own rings, int4 decoded into tensor-core operands, split-K over clusters",
    accepts=accepts,
    config=config,
    space=space,
    estimate=estimate,
    layouts=("w4_frag16_v1",),
    sources=("_linear_w4a16_sm90.cu", "_linear_w4a16_sm90.cuh", "_w4_frag16_sm90.cuh"),
    waits=True,
    triggers=True,
    priority=110,
    proven="sm_90: H200",
)
