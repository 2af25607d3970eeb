"""Weight-only int4 linear in CUDA C++ for Hopper at M <= 64 by wgmma (`_linear_w4a16_wgmma_sm90.cu`), over w4_frag16_v1.

One launch takes up to 64 rows of x; more rows are as many launches, which read the weights again: right, and better than
unpacking them for a dense product, but not the last word above 64. docs/performance/linear_weight_only.md has the figures.
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
from gristmill.kernels.linear.frag16_shapes import SHARED_BYTES
from gristmill.kernels.native import check, cuda_function

ARGUMENTS = (c_void_p, c_void_p, c_int64, *(c_void_p,) * 3, *(c_int,) * 13, c_void_p)
TYPES = {"fp16": 1, "bf16": 2}
ROWS = 64
"""Rows of x a launch."""
LARGEST_M = 256
TILE_BYTES, KEPT_BYTES, MAX_DEPTH = 1056, 1024, 16


class Shape(NamedTuple):
    """A CTA: columns of x in eights, blocks of 64 rows a warpgroup, warpgroups along N and along K, slots of x, registers."""

    nt: int
    rb: int
    wn: int
    wk: int
    nx: int
    registers: int


SHAPES = tuple(
    Shape(*values)
    for values in (
        (4, 1, 1, 2, 3, 96), (4, 2, 1, 2, 3, 168), (4, 7, 1, 2, 3, 255), (4, 3, 1, 3, 3, 168), (4, 1, 1, 4, 3, 96),
        (8, 1, 1, 2, 3, 120), (8, 2, 1, 2, 3, 232), (8, 3, 1, 2, 3, 255), (8, 1, 2, 1, 3, 120), (8, 1, 1, 3, 3, 120),
    )
)  # fmt: skip
"""The instances in `_linear_w4a16_wgmma_sm90.cu` (GM_SHAPES)."""

_COSTS = {
    4: (0.2221, 0.0064, 0.4719, 0.2857, 0.505, 0.0649, 2.6714, 0.0005),
    8: (0.2385, 0.1232, 0.6181, 0.3195, 0.5543, 0.7268, 2.8038, 0.0),
}
"""Microseconds on an H200, fitted as in linear_w4a16_sm90: a block and a group of the busiest scheduler; a block and a group
of one warp; the launch; a doubling of split; a wave; a row of x a group."""


def launch(
    config: Config, x: Any, weight: Any, bias: Any, residual: Any, silu_mul: bool, n: int, workspace: Any, out: Any
) -> None:
    """x [..., K] and the three tensors of w4_frag16_v1 -> out [..., N or N / 2]."""
    import torch

    tiles, scale_type, _ = weight
    k, rows = x.shape[-1], out.shape[-1] * (2 if silu_mul else 1)
    m = x.numel() // k
    if tiles.numel() != _ceil(rows, 16) * _ceil(k, 128) * TILE_BYTES:
        raise ValueError(
            f"linear_w4a16_wgmma_sm90: {tiles.numel()} bytes of tiles do not pack a [{rows}, {k}] weight in groups of 128"
        )
    # The gate and its partner are rows of different CTAs, so silu_mul follows in torch.
    target = torch.empty(m, rows, dtype=x.dtype, device=x.device) if silu_mul else out
    device, stride, item = x.get_device(), row_stride(x), x.element_size()
    entry = cuda_function("gm_linear_w4a16_wgmma_sm90", "sm_90a", ARGUMENTS)
    stream = torch.cuda.current_stream(device).cuda_stream
    step = min(ROWS, 8 * int(config["nt"]))
    for start in range(0, m, step):
        at = start * rows * item
        code = entry(
            target.data_ptr() + at, x.data_ptr() + start * stride * item, stride, tiles.data_ptr(),
            None if bias is None else bias.data_ptr(), None if residual is None or silu_mul else residual.data_ptr() + at,
            min(step, m - start), rows, k, TYPES[dtype_name(x.dtype)], TYPES[dtype_name(scale_type.dtype)], config["nt"],
            config["rb"], config["wn"], config["wk"], config["split"], config["depth"], 1, device, stream,
        )  # fmt: skip
        check(code, "linear_w4a16_wgmma_sm90")
    if silu_mul:
        from gristmill.kernels.linear._epilogue import finish

        finish(target.view(*x.shape[:-1], rows), None, residual, True, out)


def accepts(problem: Problem) -> str | None:
    """int4_g128 with half-precision activations of at most 256 rows."""
    scheme = QuantScheme.parse(problem.text("w"))
    if scheme.name != "int4_g128":
        return f"multiplies int4_g128, not {scheme}"
    if problem.text("x") not in TYPES:
        return f"takes fp16 or bf16 activations, not {problem.text('x')}"
    if problem["act_order"]:
        return "takes no act-order"
    if problem.integer("m") > LARGEST_M:
        return f"made for M <= {LARGEST_M}, not {problem.integer('m')}"
    if problem.integer("k") % 128:
        return f"needs K a multiple of 128, got {problem.integer('k')}"
    return None


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def shared_bytes(shape: Shape, k: int, split: int, depth: int) -> int:
    """Dynamic shared memory of a CTA, the same sum as in `_linear_w4a16_wgmma_sm90.cu`."""
    groups = shape.wn * shape.wk
    depth = min(depth, _ceil(_ceil(k // 128, split), shape.wk) * shape.rb, MAX_DEPTH)
    rings = groups * depth * 4 * TILE_BYTES + shape.wk * shape.nx * shape.nt * 8 * 256
    sums = groups * shape.rb * 4 * shape.nt * 512
    return max(rings, sums) + (shape.wn * shape.rb * 4 * shape.nt * 512 if split > 1 else 0)


def candidates(m: int, n: int, k: int) -> Iterator[tuple[Shape, int, int, int]]:
    """(shape, split, depth, shared bytes) that fit and leave no warpgroup without work."""
    need = 4 if m <= 32 else 8
    groups, tiles = k // 128, _ceil(n, 64)
    for shape in SHAPES:
        if shape.nt != need:
            continue
        for split in (1, 2, 4, 8):
            if split > 1 and (groups < split * shape.wk or _ceil(tiles, shape.rb * shape.wn) * split > 4096):
                continue
            for depth in (2, 3, 4):
                size = shared_bytes(shape, k, split, depth)
                if size + shape.wn * shape.wk * MAX_DEPTH * 16 + 2 * KEPT_BYTES <= SHARED_BYTES:
                    yield shape, split, depth, size


def microseconds(shape: Shape, split: int, size: int, m: int, n: int, k: int, processors: int) -> float:
    """Expected time of one launch: the busiest scheduler, the longest warp, or memory, and what each launch costs."""
    block, group, warp_block, warp_group, start, doubling, wave, row = _COSTS[shape.nt]
    warps = shape.wn * shape.wk * 4
    steps = _ceil(_ceil(k // 128, split), shape.wk)
    ctas = _ceil(_ceil(n, 64), shape.rb * shape.wn) * split
    resident = max(1, min(65536 // (warps * 32 * shape.registers), SHARED_BYTES // (size + 3 * KEPT_BYTES)))
    usable = (
        processors if split <= 2 else processors * 10 // 11
    )  # whole clusters of 4 and 8 do not fill every cluster of SMs
    busiest = _ceil(ctas, usable)
    waves = _ceil(busiest, resident)
    work = busiest * warps / 4 * steps * (shape.rb * block + group + row * m / shape.wn)
    latency = waves * steps * (shape.rb * warp_block + warp_group)
    memory = n * k * 0.515625 / 4.3e6
    slowest: float = (work**6 + latency**6 + memory**6) ** (1 / 6)
    return slowest + start + doubling * log2(split) + wave * waves


@lru_cache(maxsize=4096)
def _ranked(m: int, n: int, k: int, processors: int) -> tuple[tuple[float, Shape, int, int], ...]:
    found = [
        (microseconds(s, split, size, m, n, k, processors), s, split, d) for s, split, d, size in candidates(m, n, k)
    ]
    return tuple(sorted(found))


def _of(problem: Problem, target: Target) -> tuple[tuple[float, Shape, int, int], ...]:
    m, n, k = (problem.integer(axis) for axis in "mnk")
    return _ranked(min(max(m, 1), ROWS), n, k, target.multiprocessors or 132)


def _config(shape: Shape, split: int, depth: int) -> dict[str, int]:
    return {"nt": shape.nt, "rb": shape.rb, "wn": shape.wn, "wk": shape.wk, "split": split, "depth": depth}


def config(problem: Problem, target: Target) -> Config:
    """The candidate that the cost model likes best."""
    return _config(*_of(problem, target)[0][1:])


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """The candidates that the cost model likes best."""
    return [_config(*found[1:]) for found in _of(problem, target)[:24]]


def estimate(problem: Problem, target: Target) -> float | None:
    """Microseconds by the cost model, on a Hopper with HBM3e."""
    return _of(problem, target)[0][0] * _ceil(max(problem.integer("m"), 1), ROWS)


KERNEL = Kernel(
    op="linear",
    name="linear_w4a16_wgmma_sm90",
    provider="gristmill",
    language="cuda",
    target=f"{__name__}:launch",
    requires=Requirement(features=(frozenset({"wgmma", "tma"}),), vendors=("nvidia",), code="cuda:sm_90a"),
    summary="M <= 64 a launch: int4 decoded into the register operand of wgmma, x its shared-memory operand",
    accepts=accepts,
    config=config,
    space=space,
    estimate=estimate,
    layouts=("w4_frag16_v1",),
    sources=("_linear_w4a16_wgmma_sm90.cu", "_linear_w4a16_wgmma_sm90.cuh", "_w4_frag16_sm90.cuh"),
    waits=True,
    triggers=True,
    priority=105,
    proven="sm_90: H200",
)
