"""Weight-only linear by mma.sync and cp.async for every NVIDIA GPU from sm_80 on: linear_w4a16_decode_sm80.

int4 in groups of 32, 64, 128 or a row, with or without zero points, act-order included, in the tiles of w4_frag16_v1. The code is PTX,
which the driver compiles for the device. Sums meet in a fixed order: results are bitwise repeatable.
"""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.frag16_sm80 import decode
from gristmill.kernels.linear.frag16_sm80.formats import FORMATS, Format, format_of

PROCESSORS = 108
"""Multiprocessors of a target that does not say how many it has."""
TRIED = 16
"""Configurations that tuning tries."""


def accepts(problem: Problem) -> str | None:
    """The schemes of `FORMATS`, fp16 or bf16, at most 16 rows of x."""
    scheme = QuantScheme.parse(problem.text("w"))
    if format_of(scheme) is None:
        known = ", ".join(name for form in FORMATS for name in form.schemes)
        return f"multiplies weight-only formats of 4 bits, not {scheme}; it is compiled for {known}"
    if problem.text("x") not in ("fp16", "bf16"):
        return f"takes fp16 or bf16 activations, not {problem.text('x')}"
    if problem.integer("m") > decode.ROWS:
        return f"made for M <= {decode.ROWS}, not {problem.integer('m')}"
    return None


def _format(problem: Problem) -> Format:
    known = format_of(QuantScheme.parse(problem.text("w")))
    if known is None:
        raise ValueError(f"linear for sm_80: {accepts(problem)}")
    return known


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Shapes of a CTA and splits of K, best first by the model."""
    form, (m, n, k) = _format(problem), problem.integers(*"mnk")
    for _, candidate in decode.ranked(form.tile_bytes, m, n, k, target.multiprocessors or PROCESSORS)[:TRIED]:
        yield {"format": form.name, "tile_bytes": form.tile_bytes, **candidate}


def config(problem: Problem, target: Target) -> Config:
    """The first of `space`."""
    return next(iter(space(problem, target)))


def misfit(problem: Problem, config: Config) -> str | None:
    """None, or why a configuration does not run the rows of x of a problem."""
    m, nt = problem.integer("m"), int(config["nt"])
    return None if m <= 8 * nt else f"a CTA has {8 * nt} columns for rows of x, not {m}"


def workspace(problem: Problem, config: Config) -> Workspace:
    """Counters, zero before a call and after it, then the sums of every part of K; nothing without a split."""
    nt, rt, split = (int(config[name]) for name in ("nt", "rt", "split"))
    size = decode.workspace_bytes(problem.integer("n"), nt, rt, split)
    return Workspace(size, zeroed=size > 0)


KERNEL = Kernel(
    op="linear",
    name="linear_w4a16_decode_sm80",
    provider="gristmill",
    language="cuda",
    target="gristmill.kernels.linear.frag16_sm80._launch:launch",
    requires=Requirement(
        features=(frozenset({"mma.bf16", "cp_async", "ldmatrix"}),),
        vendors=("nvidia",),
        code="cuda:compute_80",
    ),
    summary="M <= 16: 4-bit weights straight into tensor-core operands, x by cp.async, deterministic split of K",
    accepts=accepts,
    config=config,
    space=space,
    misfit=misfit,
    workspace=workspace,
    layouts=("w4_frag16_v1",),
    examples=(
        "m=16,n=257,k=4096,w=int4_g128",
        "m=8,n=48,k=16384,x=fp16,w=int4_g128",
        "m=9,n=66,k=1152,x=fp16,w=int4_g32_zp,epilogue=bias+silu_mul",
        "m=16,n=130,k=2056,w=int4_g32",
        "m=1,n=4112,k=1000,w=int4_g64_zp,epilogue=bias+residual",
        "m=3,n=40,k=640,x=fp16,w=int4_g128_zp,act_order=true",
    ),
    priority=105,
)
