"""Weight-only int4 linear in CUDA C++ for Hopper at M > 16 (`_linear_w4a16_tma_sm90.cu`), over w4_frag16_v1.

Warp-specialised: one thread copies, the other warpgroups decode weights into wgmma's register operand. Weights are rounded
to x's type once they are scaled. docs/performance/linear_weight_only.md has the measurements, and what was tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ctypes import c_int, c_int64, c_void_p
from functools import lru_cache
from math import log2
from typing import Any, NamedTuple

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.common import dtype_name, row_stride
from gristmill.kernels.native import check, cuda_function

ARGUMENTS = (c_void_p, c_void_p, c_int64, *(c_void_p,) * 4, *(c_int,) * 13, c_void_p)
TYPES = {"fp16": 1, "bf16": 2}
TILE_BYTES = 1056
FLAG_BYTES = 1 << 16
RASTER_BYTES = 16 << 20
"""Rows of x that CTAs running together share: as many as stay in L2 beside the weights."""


class Shape(NamedTuple):
    """A CTA: rows of x, blocks of 64 rows of W, CTAs a multiprocessor, slots of x (64 k) and of W (128 k)."""

    mt: int
    c: int
    ctas: int
    xs: int
    ws: int


SHAPES = tuple(
    Shape(*v) for v in ((32, 2, 2, 8, 6), (64, 2, 2, 6, 5), (128, 2, 1, 8, 6), (128, 4, 1, 7, 5), (256, 2, 1, 5, 5))
)
"""The instances in `_linear_w4a16_tma_sm90.cu` (GM_SHAPES)."""


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
            f"linear_w4a16_tma_sm90: {tiles.numel()} bytes of tiles do not pack a [{rows}, {k}] weight in groups of 128"
        )
    if m == 0:
        return
    stride = row_stride(x)
    if stride % 8 or stride < k or x.data_ptr() % 16:  # the tensor copy engine wants rows of 16 bytes
        x = x.clone(memory_format=torch.contiguous_format)
        stride = k
    # The gate and its partner are rows of different CTAs, so silu_mul follows in torch.
    target = torch.empty(m, rows, dtype=x.dtype, device=x.device) if silu_mul else out
    device, scratch = x.get_device(), None
    if config["even"]:
        space = _scratch(workspace, config, x.device)
        scratch = space.data_ptr()
    code = cuda_function("gm_linear_w4a16_tma_sm90", "sm_90a", ARGUMENTS)(
        target.data_ptr(), x.data_ptr(), stride, tiles.data_ptr(), None if bias is None else bias.data_ptr(),
        None if residual is None or silu_mul else residual.data_ptr(), scratch, m, rows, k, TYPES[dtype_name(x.dtype)],
        TYPES[dtype_name(scale_type.dtype)], config["mt"], config["c"], config["split"], config["grid"], config["raster"],
        config["even"], 1, device, torch.cuda.current_stream(device).cuda_stream,
    )  # fmt: skip
    check(code, "linear_w4a16_tma_sm90")
    if silu_mul:
        from gristmill.kernels.linear._epilogue import finish

        finish(target.view(*x.shape[:-1], rows), None, residual, True, out)


def scratch_bytes(config: Config) -> int:
    """Bytes of flags, which must be zero and are left so, and of the partial sums behind them."""
    return FLAG_BYTES + int(config["grid"]) * int(config["mt"]) * int(config["c"]) * 256 if config["even"] else 0


def workspace(problem: Problem, config: Config) -> Workspace:
    """Room for partial sums, where tiles are dealt out along K."""
    return Workspace(scratch_bytes(config), zeroed=bool(config["even"]))


def _scratch(given: Any, config: Config, device: Any) -> Any:
    """The caller's workspace, or fresh memory. ValueError for one that is too small or elsewhere."""
    import torch

    size = scratch_bytes(config)
    if given is None:
        fresh = torch.empty(size, dtype=torch.uint8, device=device)
        fresh[:FLAG_BYTES].zero_()
        return fresh
    if given.nbytes < size or given.device != device or not given.is_contiguous() or given.data_ptr() % 16:
        raise ValueError(f"linear_w4a16_tma_sm90: the workspace must be {size} contiguous bytes on {device}, 16-byte aligned, "
                         f"got {given.nbytes} on {given.device}")  # fmt: skip
    return given


def accepts(problem: Problem) -> str | None:
    """int4_g128 with half-precision activations."""
    scheme = QuantScheme.parse(problem.text("w"))
    if scheme.name != "int4_g128":
        return f"multiplies int4_g128, not {scheme}"
    if problem.text("x") not in TYPES:
        return f"takes fp16 or bf16 activations, not {problem.text('x')}"
    if problem["act_order"]:
        return "takes no act-order"
    if problem.integer("k") % 128:
        return f"needs K a multiple of 128, got {problem.integer('k')}"
    return None


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


_COSTS = {
    (32, 2): (0.314, 0.366, 3.65, 0.961, 0.0414, 0.374, 0.488, 3.18, 0.4),
    (64, 2): (0.341, 0.412, 4.32, 1.28, 0.262, 0.127, 0.572, 3.81, 0.115),
    (128, 2): (0.484, 0.48, 3.3, 1.27, 0.814, 1.01, 0.743, 4.98, 0.111),
    (128, 4): (1.35, 0.366, 2, 0.625, 2.65, 3.64, 1.44, 6.91, 0.18),
    (256, 2): (1.08, 0.408, 4.81, 3.17, 0.299, 3.2, 0.711, 8.1, 0.222),
}
"""Microseconds on an H200 by shape, fitted to 432 measurements: a group of a multiprocessor's work; a group of one CTA; the launch;
sharing a tile in a cluster, and for each doubling; dealing tiles out, and for each CTA that a tile is dealt to; a wave; then the
part by which long products are slower (power)."""


class Work(NamedTuple):
    """Groups of the busiest multiprocessor, groups of a CTA one after the other, waves of CTAs, CTAs that a tile is dealt to."""

    busiest: float
    chain: int
    waves: int
    dealt: float


def _waves(shape: Shape, split: int, even: int, grid: int, tiles: int, groups: int, processors: int) -> Work:
    """How the groups of `tiles` tiles fall to multiprocessors and CTAs."""
    if even and tiles % grid:
        dealt = tiles if tiles < 2 * grid else tiles % grid + grid
        chain = _ceil(dealt * groups, grid) + (tiles - dealt) // grid * groups
        return Work(chain * grid / processors, chain, 1, min(grid / tiles, groups) if tiles < grid else 1)
    if split == 1:
        chain = _ceil(tiles, grid) * groups
        return Work(chain * _ceil(min(tiles, grid), processors), chain, 1, 0)
    # Whole clusters of 4 and 8 do not fill every cluster of multiprocessors.
    busiest = _ceil(tiles * split, processors if split == 2 else processors * 10 // 11)
    waves = _ceil(busiest, shape.ctas)
    return Work(busiest * _ceil(groups, split), waves * _ceil(groups, split), waves, 0)


def microseconds(shape: Shape, split: int, even: int, grid: int, m: int, n: int, k: int, processors: int) -> float:
    """Expected time: the products of the busiest multiprocessor, the longest CTA, or memory, and what launch and sums cost."""
    group, late, start, cluster, doubling, deal, part, wave, hot = _COSTS[shape.mt, shape.c]
    across, down = _ceil(n, shape.c * 64), _ceil(m, shape.mt)
    work = _waves(shape, split, even, grid, across * down, k // 128, processors)
    weight = n * k * 0.515625
    memory = (weight + 2 * m * (n + k)) / 4.3e6
    cache = (across * m * k * 2 + down * weight) / 7.5e6
    time = ((work.busiest * group) ** 6 + (work.chain * late) ** 6 + memory**6 + cache**6) ** (1 / 6)
    time *= 1 + hot * min(1.0, time / 300)
    sums = cluster + doubling * log2(split) if split > 1 else deal + part * work.dealt if work.dealt else 0.0
    return float(time + start + sums + wave * (work.waves - 1))


def candidates(m: int, n: int, k: int, processors: int) -> Iterator[tuple[Shape, int, int, int]]:
    """(shape, split, even, grid) that leave no CTA without work."""
    for shape in SHAPES:
        if shape.mt > 32 and shape.mt // 2 >= m:
            continue  # half of it would do
        if shape.mt < 128 and shape.mt * 4 < m:
            continue  # weights would be decoded too often
        tiles, full = _ceil(n, shape.c * 64) * _ceil(m, shape.mt), processors * shape.ctas
        yield shape, 1, 0, full
        for grid in sorted({processors, full}):
            if tiles % grid and tiles * (k // 128) >= grid:
                yield shape, 1, 1, grid
        for split in (2, 4, 8):
            if m <= shape.mt * 2 and k // 128 >= split and split <= shape.mt // 8:
                yield shape, split, 0, full


@lru_cache(maxsize=4096)
def _ranked(m: int, n: int, k: int, processors: int) -> tuple[tuple[float, Shape, int, int, int], ...]:
    return tuple(sorted((microseconds(*c, m, n, k, processors), *c) for c in candidates(m, n, k, processors)))


def _config(shape: Shape, split: int, even: int, grid: int, m: int, k: int) -> dict[str, int]:
    raster = max(1, min(_ceil(m, shape.mt), RASTER_BYTES // (k * 2 * shape.mt)))
    return {"mt": shape.mt, "c": shape.c, "split": split, "grid": grid, "raster": raster, "even": even}


def _axes(problem: Problem, target: Target) -> tuple[int, int, int, int]:
    m, n, k = (problem.integer(axis) for axis in "mnk")
    return max(m, 1), n, k, target.multiprocessors or 132


def config(problem: Problem, target: Target) -> Config:
    """The candidate that the cost model likes best."""
    m, n, k, processors = _axes(problem, target)
    return _config(*_ranked(m, n, k, processors)[0][1:], m, k)


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """The candidates, in the order of the cost model."""
    m, n, k, processors = _axes(problem, target)
    return [_config(*found[1:], m, k) for found in _ranked(m, n, k, processors)]


def estimate(problem: Problem, target: Target) -> float | None:
    """Microseconds by the cost model, on a Hopper with HBM3e."""
    return _ranked(*_axes(problem, target))[0][0]


KERNEL = Kernel(
    op="linear",
    name="linear_w4a16_tma_sm90",
    provider="gristmill",
    language="cuda",
    target=f"{__name__}:launch",
    requires=Requirement(features=(frozenset({"wgmma", "tma"}),), vendors=("nvidia",), code="cuda:sm_90a"),
    summary="M > 16: warp-specialised, int4 decoded into the register operand of wgmma while the product before runs",
    accepts=accepts,
    config=config,
    space=space,
    workspace=workspace,
    estimate=estimate,
    layouts=("w4_frag16_v1",),
    sources=(
        "_linear_w4a16_tma_sm90.cu",
        "_linear_w4a16_tma_sm90.cuh",
        "_w4_tiles_of_y_sm90.cuh",
        "_w4_scales_sm90.cuh",
        "_wgmma_rs_sm90.cuh",
        "_w4_frag16_sm90.cuh",
    ),
    waits=True,
    triggers=True,
    priority=108,
    proven="sm_90: H200",
)
