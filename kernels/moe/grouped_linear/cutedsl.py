"""Grouped linear of dense weights in CuTe DSL, compiled on the user's machine: grouped_linear_cutedsl_sm90 for Hopper (`_cutedsl_sm90.py`) and
grouped_linear_cutedsl_sm100 for data-centre Blackwell (`_cutedsl_sm100.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from gristmill.kernel_registry.kernel import Config, ConfigValue, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.common import need
from gristmill.kernels.cutedsl import PACKAGES, CuteDslCase, program
from gristmill.kernels.cutedsl.devices import PROCESSORS

if TYPE_CHECKING:
    from gristmill.kernels.calls import GroupedLinearCall

STEP = 64
"""Columns of K of a slot."""


class Machine(NamedTuple):
    """What differs between architectures.

    Attributes:
        name: ends the names of kernels and of the module of device code.
        instruction: of products, as a feature of targets.
        code: as of `Requirement.code`.
        arch: compiled for where no target says another.
        tiles: rows of x and of W of a tile -> slots of its ring, as many as shared memory has room for.
        processors: multiprocessors of a target that does not say how many it has.
    """

    name: str
    instruction: str
    code: str
    arch: str
    tiles: dict[tuple[int, int], int]
    processors: int

    @property
    def requires(self) -> Requirement:
        """What its kernels need."""
        features = (frozenset({self.instruction, "tma"}),)
        return Requirement(
            features=features, vendors=("nvidia",), packages=PACKAGES, code=f"cutedsl:{self.code}"
        )

    def ranked(self, rows: int, experts: int, n: int, ctas: int) -> list[dict[str, ConfigValue]]:
        """The tiles, best first for so many rows of x, which the experts share evenly, and N rows of W.

        As few rows of x as hold those of an expert; then as little as possible of W, and of x beside it, for the CTA that has most tiles.
        """
        active = max(1, min(experts, rows))
        high = 64 if rows <= 64 * active else 128

        def order(tile: tuple[int, int]) -> tuple[bool, float]:
            bm, bn = tile
            tiles = active * cdiv(cdiv(rows, active), bm) * cdiv(n, bn)
            return bm != high, cdiv(tiles, ctas) * (bn + bm / 4)

        return [{"bm": bm, "bn": bn, "slots": self.tiles[bm, bn]} for bm, bn in sorted(self.tiles, key=order)]

    def ctas(self, target: Target) -> int:
        """One for each multiprocessor."""
        return target.multiprocessors or self.processors

    def fixed(self, x: str, target: Target) -> dict[str, ConfigValue]:
        """What every configuration has: CTAs, the type, the architecture."""
        return {"ctas": self.ctas(target), "x": x, "arch": target.nvcc_arch or self.arch}


MACHINES = (
    Machine(
        "sm90",
        "wgmma",
        "sm_90a",
        "sm_90a",
        {(128, 256): 3, (128, 128): 6, (64, 256): 4, (64, 128): 6, (64, 64): 12},
        132,
    ),
    Machine("sm100", "tcgen05", "sm_100f", "sm_100a", {(128, 256): 4, (128, 128): 6}, PROCESSORS),
)


def refusal(w: str, x: str, columns: int, k: int) -> str | None:
    """Why a product of these types and sizes, with `columns` columns of y, is refused; None if it is not."""
    scheme = QuantScheme.parse(w)
    if x not in ("fp16", "bf16") or str(scheme) != x:
        return f"multiplies fp16 by fp16 and bf16 by bf16, not {scheme} by {x}"
    if k % 8 or columns % 8:
        return f"rows of x, W and y must be whole 16 bytes: needs K and y's columns in multiples of 8, got {k} and {columns}"
    return None


def accepts(problem: Problem) -> str | None:
    """None, or the reason why not."""
    n, k = problem.integers(*"nk")
    columns = n // 2 if "silu_mul" in problem.flags("epilogue") else n
    return refusal(problem.text("w"), problem.text("x"), columns, k)


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
    if config["arch"] == "sm_90a":  # either imports CuTe DSL
        from gristmill.kernels.moe.grouped_linear._cutedsl_sm90 import grouped_linear
    else:
        from gristmill.kernels.moe.grouped_linear._cutedsl_sm100 import grouped_linear

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
    machine = next(one for one in MACHINES if one.instruction in target.features)
    build = f"gristmill.kernels.moe.grouped_linear._cutedsl_{machine.name}:grouped_linear"
    return [
        CuteDslCase(
            f"{bm}x{bn}_{epilogue.replace('+', '_')}{'_gather' if gather else ''}",
            build,
            {
                "bm": bm,
                "bn": bn,
                "slots": machine.tiles[bm, bn],
                "epilogue": epilogue,
                "gather": gather,
                **machine.fixed("bf16", target),
            },
            (machine.instruction, "tma"),
        )
        for bm, bn, epilogue, gather in (
            (128, 256, "none", False),
            (128, 256, "silu_mul", True),
            (128, 128, "bias+clamp+silu_mul", True),
            (64, 256, "silu_mul", True),
            (64, 128, "bias", False),
            (64, 64, "silu_mul", True),
        )
        if (bm, bn) in machine.tiles
    ]


def kernel(machine: Machine) -> Kernel:
    """The spec of the kernel of an architecture."""

    def space(problem: Problem, target: Target) -> Iterable[Config]:
        (m, e, n), flags = problem.integers(*"men"), problem.flags("epilogue")
        epilogue, gather = "+".join(sorted(flags)) or "none", bool(problem["gather"])
        for tile in machine.ranked(m, e, n, machine.ctas(target)):
            yield {**tile, "epilogue": epilogue, "gather": gather, **machine.fixed(problem.text("x"), target)}

    def config(problem: Problem, target: Target) -> Config:
        return next(iter(space(problem, target)))

    return Kernel(
        op="grouped_linear",
        name=f"grouped_linear_cutedsl_{machine.name}",
        provider="gristmill",
        language="cutedsl",
        target=f"{__name__}:launch",
        aot=f"{__name__}:aot",
        requires=machine.requires,
        summary=f"persistent warp-specialized {machine.instruction}; rows of x by TMA, gathered ones by cp.async; every epilogue",
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
            "m=150,e=3,n=96,k=200,gather=2,epilogue=silu_mul",
        ),
        priority=55,
    )


KERNELS = tuple(kernel(machine) for machine in MACHINES)
