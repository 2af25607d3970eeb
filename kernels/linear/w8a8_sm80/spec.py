"""Linear with int8 weights and int8 activations for every NVIDIA GPU from sm_80 on: one scale per row of W and one per row of x.

x is quantized by the rules of `quant/activations.py` in one launch (`_quantize_int8_sm80.cu`), unless codes are given, and multiplied in the
next (`product.cuh`). Weights stay as checkpoints have them, in plain_v1. Sums are exact, and so are the same for a row of x whatever the other
rows and the shape of a CTA are.
"""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.w8a8_sm80.shapes import ranked, room_of

SCHEME = "int8_ch.int8_token"
LONGEST_K = 1 << 16
"""int32 holds the sum of twice as many products of two codes."""
PROCESSORS = 108
"""Multiprocessors of a target that does not say how many it has."""
TRIED = 16
"""Configurations that tuning tries."""


def accepts(problem: Problem) -> str | None:
    """int8 by channel and token, fp16 or bf16, rows of whole 16 bytes."""
    scheme, k = str(QuantScheme.parse(problem.text("w"))), problem.integer("k")
    if scheme != SCHEME:
        return f"multiplies {SCHEME}, not {scheme}"
    if problem.text("x") not in ("fp16", "bf16"):
        return f"takes fp16 or bf16 activations, not {problem.text('x')}"
    if k % 16 or k > LONGEST_K:
        return f"copies rows of whole 16 bytes: needs K a multiple of 16 and at most {LONGEST_K}, got K={k}"
    return None


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """The shapes and partitions that suit the problem, best first by the model."""
    for _, candidate in ranked(*problem.integers(*"mnk"), target.multiprocessors or PROCESSORS)[:TRIED]:
        yield {**candidate}


def config(problem: Problem, target: Target) -> Config:
    """The first of `space`."""
    return next(iter(space(problem, target)))


def workspace(problem: Problem, config: Config) -> Workspace:
    """Counters, zero before a call and after it; partial sums; quantized rows of x; gate and up before they are multiplied."""
    m, n, k = problem.integers(*"mnk")
    gated = n if "silu_mul" in problem.flags("epilogue") else 0
    return Workspace(room_of(config, m, k, gated, bool(problem["codes"])).size, zeroed=True)


KERNEL = Kernel(
    op="linear",
    name="linear_w8a8_sm80",
    provider="gristmill",
    language="cuda",
    target="gristmill.kernels.linear.w8a8_sm80._launch:launch",
    requires=Requirement(
        features=(frozenset({"mma.int8", "cp_async", "ldmatrix"}),),
        vendors=("nvidia",),
        code="cuda:compute_80",
    ),
    summary="x quantized in a launch of its own; int8 operands of mma.sync from rings of cp.async, exact sums, deterministic stream-K",
    accepts=accepts,
    supports=("codes",),
    config=config,
    space=space,
    workspace=workspace,
    layouts=("plain_v1",),
    examples=(
        "m=0,n=64,k=128,w=int8_ch.int8_token",
        "m=1,n=4112,k=4096,w=int8_ch.int8_token",
        "m=7,n=257,k=2880,x=fp16,w=int8_ch.int8_token,epilogue=bias",
        "m=17,n=66,k=16,w=int8_ch.int8_token",
        "m=65,n=6,k=1168,w=int8_ch.int8_token,epilogue=bias+silu_mul",
        "m=257,n=131,k=272,x=fp16,w=int8_ch.int8_token,epilogue=bias+residual",
        "m=300,n=520,k=4096,w=int8_ch.int8_token,epilogue=residual",
        "m=2,n=40,k=16384,w=int8_ch.int8_token,codes=true",
        "m=130,n=264,k=1008,x=fp16,w=int8_ch.int8_token,epilogue=bias+residual+silu_mul,codes=true",
    ),
    batch_invariant=True,
    priority=104,
)
