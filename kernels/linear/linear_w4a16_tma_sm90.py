"""Weight-only int4 linear in CUDA C++ for Hopper at M > 16 (`_linear_w4a16_tma_sm90.cu`), over w4_frag16_v1.

Warp-specialised: one thread copies, the other warpgroups decode weights into wgmma's register operand. Weights are rounded
to x's type once they are scaled. docs/performance/linear_weight_only.md has the measurements, and what was tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ctypes import c_int, c_int64, c_void_p
from functools import lru_cache
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


SHAPES = tuple(Shape(*v) for v in ((32, 2, 2, 8, 6), (64, 2, 2, 6, 5), (128, 2, 1, 8, 6), (128, 4, 1, 7, 5), (256, 2, 1, 5, 5)))
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


def candidates(m: int, n: int, k: int) -> Iterator[tuple[Shape, int]]:
    """(shape, split) that leave no CTA without work."""
    for shape in SHAPES:
        if shape.mt > 32 and shape.mt // 2 >= m:
            continue  # half of it would do
        for split in (1, 2, 4, 8):
            if split == 1 or (k // 128 >= split and split <= shape.mt // 8):
                yield shape, split


def microseconds(shape: Shape, split: int, m: int, n: int, k: int, processors: int) -> float:
    """Expected time: the busiest multiprocessor's products or decoding, or memory, and what each CTA costs."""
    groups = _ceil(k // 128, split)
    tiles = _ceil(n, shape.c * 64) * _ceil(m, shape.mt)
    ctas = tiles * split
    busiest = _ceil(ctas, processors)
    cycles = max(shape.mt * 4.4, 256) * shape.c * groups
    waves = _ceil(busiest, shape.ctas)
    overhead = 3.0 + (1.5 if split > 1 else 0.0) + 0.9 * (waves - 1 if split > 1 else 0)
    memory = n * k * 0.515625 / 4.2e6 + (m * n + m * k) * 2 / 4.2e6
    return float(max(busiest * cycles / 1.75e3, memory)) + overhead


@lru_cache(maxsize=4096)
def _ranked(m: int, n: int, k: int, processors: int) -> tuple[tuple[float, Shape, int], ...]:
    return tuple(sorted((microseconds(s, split, m, n, k, processors), s, split) for s, split in candidates(m, n, k)))


def _config(shape: Shape, split: int, m: int, k: int, processors: int, even: int = 0) -> dict[str, int]:
    raster = max(1, min(_ceil(m, shape.mt), RASTER_BYTES // (k * 2 * shape.mt)))
    return {"mt": shape.mt, "c": shape.c, "split": split, "grid": processors * shape.ctas, "raster": raster, "even": even}


def _axes(problem: Problem, target: Target) -> tuple[int, int, int, int]:
    m, n, k = (problem.integer(axis) for axis in "mnk")
    return max(m, 1), n, k, target.multiprocessors or 132


def config(problem: Problem, target: Target) -> Config:
    """The candidate that the cost model likes best."""
    m, n, k, processors = _axes(problem, target)
    _, shape, split = _ranked(m, n, k, processors)[0]
    return _config(shape, split, m, k, processors)


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """The candidates, in the order of the cost model."""
    m, n, k, processors = _axes(problem, target)
    return [_config(shape, split, m, k, processors) for _, shape, split in _ranked(m, n, k, processors)]


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
    sources=("_linear_w4a16_tma_sm90.cu", "_linear_w4a16_tma_sm90.cuh", "_wgmma_rs_sm90.cuh", "_w4_frag16_sm90.cuh"),
    waits=True,
    triggers=True,
    priority=108,
    proven="",
)
