"""Grouped linear of dense weights in CuTe DSL for Hopper (`_cutedsl_sm90.py`): grouped_linear_cutedsl_sm90, compiled on the user's machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, ConfigValue, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.common import need
from gristmill.kernels.cutedsl import PACKAGES, CuteDslCase, program

if TYPE_CHECKING:
    from gristmill.kernels.calls import GroupedLinearCall

REQUIRES = Requirement(
    features=(frozenset({"wgmma", "tma"}),),
    vendors=("nvidia",),
    packages=PACKAGES,
    code="cutedsl:sm_90a",
)
TILES = {(128, 256): 3, (128, 128): 6, (64, 256): 4, (64, 128): 6}
"""Rows of x and of W of a tile -> slots of its ring, as many as shared memory has room for."""
PROCESSORS = 132
"""Multiprocessors of a target that does not say how many it has."""
STEP = 64
"""Columns of K of a slot."""


def refusal(w: str, x: str, columns: int, k: int, gather: bool) -> str | None:
    """Why a product of these types and sizes, with `columns` columns of y, is refused; None if it is not."""
    scheme = QuantScheme.parse(w)
    if x not in ("fp16", "bf16") or str(scheme) != x:
        return f"multiplies fp16 by fp16 and bf16 by bf16, not {scheme} by {x}"
    if k % 8 or columns % 8:
        return f"rows of x, W and y must be whole 16 bytes: needs K and y's columns in multiples of 8, got {k} and {columns}"
    if gather and k % STEP:
        return f"gathers rows in whole steps of {STEP} columns, got K={k}"
    return None


def accepts(problem: Problem) -> str | None:
    """None, or the reason why not."""
    n, k = problem.integers(*"nk")
    columns = n // 2 if "silu_mul" in problem.flags("epilogue") else n
    return refusal(problem.text("w"), problem.text("x"), columns, k, bool(problem["gather"]))


def tiles(rows: float) -> Iterable[dict[str, int]]:
    """The tiles, best first for an expert of so many rows: as few rows of x as hold them."""
    for bm, bn in sorted(TILES, key=lambda tile: (tile[0] != (64 if rows <= 64 else 128), -tile[1])):
        yield {"bm": bm, "bn": bn, "slots": TILES[bm, bn]}


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Every tile, one CTA per multiprocessor."""
    (m, e), flags = problem.integers(*"me"), problem.flags("epilogue")
    rest: dict[str, ConfigValue] = {
        "ctas": target.multiprocessors or PROCESSORS,
        "x": problem.text("x"),
        "epilogue": "+".join(sorted(flags)) or "none",
        "gather": bool(problem["gather"]),
        "arch": target.nvcc_arch or "sm_90a",
    }
    for one in tiles(m / e):
        yield {**one, **rest}


def config(problem: Problem, target: Target) -> Config:
    """The first of `space`."""
    return next(iter(space(problem, target)))


def launch(config: Config, call: GroupedLinearCall) -> None:
    """Sorted rows [P, K], or rows that a permutation gathers, and W [E, N, K] -> out [P, N or N / 2]. Compiles at first use.

    Raises:
        ValueError: rows of x that do not start at multiples of 16 bytes.
    """
    x, (weight,), out = call.x, call.weight, call.out
    need(
        x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0,
        f"grouped_linear: rows of x must be contiguous and start at multiples of 16 bytes, got strides {x.stride()}",
    )
    if not out.shape[0]:
        return
    from gristmill.kernels.moe.grouped_linear._cutedsl_sm90 import grouped_linear  # imports CuTe DSL

    program(grouped_linear, config)(
        x,
        weight,
        call.expert_offsets,
        call.expert_offsets if call.permutation is None else call.permutation,
        out if call.bias is None else call.bias,
        out,
        call.top_k,
        config["ctas"],
        call.alpha,
        call.limit,
    )


def aot(target: Target) -> list[CuteDslCase]:
    """Tiles and epilogues that differ in code."""
    fixed: dict[str, ConfigValue] = {"ctas": PROCESSORS, "x": "bf16", "arch": target.nvcc_arch or "sm_90a"}
    return [
        CuteDslCase(
            f"{bm}x{bn}_{epilogue.replace('+', '_')}{'_gather' if gather else ''}",
            "gristmill.kernels.moe.grouped_linear._cutedsl_sm90:grouped_linear",
            {"bm": bm, "bn": bn, "slots": TILES[bm, bn], "epilogue": epilogue, "gather": gather, **fixed},
            ("wgmma", "tma"),
        )
        for bm, bn, epilogue, gather in (
            (128, 256, "none", False),
            (128, 256, "silu_mul", True),
            (128, 128, "bias+clamp+silu_mul", True),
            (64, 256, "silu_mul", True),
            (64, 128, "bias", False),
        )
    ]


KERNEL = Kernel(
    op="grouped_linear",
    name="grouped_linear_cutedsl_sm90",
    provider="gristmill",
    language="cutedsl",
    target=f"{__name__}:launch",
    aot=f"{__name__}:aot",
    requires=REQUIRES,
    summary="persistent warp-specialized wgmma; rows of x by TMA, gathered ones by cp.async; every epilogue",
    accepts=accepts,
    config=config,
    space=space,
    layouts=("dense_v1",),
    examples=(
        "m=300,e=3,n=520,k=640",
        "m=257,e=5,n=264,k=72,x=fp16,w=fp16,epilogue=bias",
        "m=600,e=4,n=1040,k=512,epilogue=silu_mul,gather=2",
        "m=33,e=40,n=96,k=128,gather=3,epilogue=bias+silu_mul+clamp",
        "m=7,e=65,n=16,k=8,epilogue=silu_mul",
        "m=90,e=2,n=24,k=192,x=fp16,w=fp16,gather=1,epilogue=bias",
    ),
    priority=55,
)
