"""Linear with 8-bit weights and 8-bit activations for NVIDIA GPUs without Hopper's instructions: int8 from sm_75 on, e4m3 from sm_89 on.

x is quantized by the rules of `quant/activations.py` in one launch (`quantize_int8.h`, `_quantize_fp8_sm89.cu`; with one scale for all of x in
two), unless codes are given, and multiplied in the next (`product.cuh`). Weights stay as checkpoints have them, in plain_v1. A static scale
of activations is a given one: x comes as codes.

int8 sums are exact, and so are the same for a row of x whatever the other rows and the shape of a CTA are. Sums of e4m3 products have two
levels, because tensor cores keep 13 bits of the fraction (`product.cuh`). mma.sync on e4m3 is one instruction on sm_89, sm_120 and sm_121; for
sm_90, sm_100 and sm_103 the assembler makes fp16 products of it, with the same codes, at the rate of fp16.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.w8a8_sm80.shapes import (
    FP8,
    FP8_BLOCK,
    INT8,
    INT8_TURING,
    Operands,
    ranked,
    room_of,
)

LONGEST_K = 1 << 16
"""int32 holds the sum of twice as many products of two int8 codes."""
PROCESSORS = 108
"""Multiprocessors of a target that does not say how many it has."""
TRIED = 16
"""Configurations that tuning tries."""
Choice = dict[str, Operands]
"""Scheme -> the operands that a kernel multiplies for it."""


def accepts(choice: Choice, problem: Problem) -> str | None:
    """One of the schemes, fp16 or bf16, columns in order, rows of whole 16 bytes."""
    scheme, k = str(QuantScheme.parse(problem.text("w"))), problem.integer("k")
    if scheme not in choice:
        return f"multiplies {', '.join(choice)}, not {scheme}"
    if problem.text("x") not in ("fp16", "bf16"):
        return f"takes fp16 or bf16 activations, not {problem.text('x')}"
    if problem["act_order"]:
        return "takes no act-order"
    if k % 16 or k > LONGEST_K:
        return f"copies rows of whole 16 bytes: needs K a multiple of 16 and at most {LONGEST_K}, got K={k}"
    return None


def space(choice: Choice, problem: Problem, target: Target) -> Iterable[Config]:
    """The shapes and partitions that suit the problem, best first by the model."""
    scheme = QuantScheme.parse(problem.text("w"))
    operands = choice[scheme.name]
    processors = target.multiprocessors or PROCESSORS
    for _, candidate in ranked(operands, *problem.integers(*"mnk"), processors)[:TRIED]:
        yield {"format": operands.format, "activation": str(scheme.activation), **candidate}


def config(choice: Choice, problem: Problem, target: Target) -> Config:
    """The first of `space`."""
    return next(iter(space(choice, problem, target)))


def workspace(problem: Problem, config: Config) -> Workspace:
    """Counters, zero before a call and after it; partial sums; quantized rows of x; gate and up before they are multiplied."""
    m, n, k = problem.integers(*"mnk")
    gated = n if "silu_mul" in problem.flags("epilogue") else 0
    return Workspace(room_of(config, m, k, gated, bool(problem["codes"])).size, zeroed=True)


def kernel(
    name: str,
    operands: tuple[Operands, ...],
    features: set[str],
    summary: str,
    examples: tuple[str, ...],
    priority: int = 104,
) -> Kernel:
    """The kernel that multiplies these operands, which are in one library of PTX."""
    choice = {scheme: one for one in operands for scheme in one.schemes}
    return Kernel(
        op="linear",
        name=name,
        provider="gristmill",
        language="cuda",
        target=f"gristmill.kernels.linear.w8a8_sm80._launch_sm{operands[0].arch}:launch",
        requires=Requirement(
            features=(frozenset(features),),
            vendors=("nvidia",),
            code=f"cuda:compute_{operands[0].arch}",
        ),
        summary=summary,
        accepts=partial(accepts, choice),
        supports=("codes",),
        config=partial(config, choice),
        space=partial(space, choice),
        workspace=workspace,
        layouts=("plain_v1",),
        examples=examples,
        batch_invariant=operands[0].schemes == INT8.schemes,
        priority=priority,
    )


INT8_EXAMPLES = (
    "m=0,n=64,k=128,w=int8_ch.int8_token",
    "m=1,n=4112,k=4096,w=int8_ch.int8_token",
    "m=7,n=257,k=2880,x=fp16,w=int8_ch.int8_token,epilogue=bias",
    "m=17,n=66,k=16,w=int8_ch.int8_token",
    "m=65,n=6,k=1168,w=int8_ch.int8_token,epilogue=bias+silu_mul",
    "m=257,n=131,k=272,x=fp16,w=int8_ch.int8_token,epilogue=bias+residual",
    "m=300,n=520,k=4096,w=int8_ch.int8_token,epilogue=residual",
    "m=2,n=40,k=16384,w=int8_ch.int8_token,codes=true",
    "m=130,n=264,k=1008,x=fp16,w=int8_ch.int8_token,epilogue=bias+residual+silu_mul,codes=true",
)

KERNELS = (
    kernel(
        "linear_w8a8_sm80",
        (INT8,),
        {"mma.int8", "cp_async", "ldmatrix"},
        "x quantized in a launch of its own; int8 operands of mma.sync from rings of cp.async, exact sums, deterministic stream-K",
        INT8_EXAMPLES,
    ),
    kernel(
        "linear_w8a8_sm75",
        (INT8_TURING,),
        {"mma.int8", "ldmatrix"},
        "x quantized in a launch of its own; int8 operands of Turing's mma.sync, loaded through registers, exact sums, deterministic stream-K",
        INT8_EXAMPLES,
        priority=103,
    ),
    kernel(
        "linear_w8a8_sm89",
        (FP8, FP8_BLOCK),
        {"mma.fp8", "cp_async", "ldmatrix"},
        "x quantized in a launch of its own; e4m3 operands of mma.sync from rings of cp.async, two-level sums, deterministic stream-K",
        (
            "m=0,n=64,k=128,w=fp8_ch.fp8_token",
            "m=1,n=4112,k=4096,w=fp8.fp8_token",
            "m=7,n=257,k=2880,x=fp16,w=fp8_block.fp8_g128,epilogue=bias",
            "m=17,n=66,k=16,w=fp8_block.fp8_g128",
            "m=65,n=6,k=1168,w=fp8_ch.fp8,epilogue=bias+silu_mul",
            "m=257,n=131,k=272,x=fp16,w=fp8_ch.fp8_token,epilogue=bias+residual",
            "m=300,n=520,k=4096,w=fp8.fp8,epilogue=residual",
            "m=33,n=200,k=656,w=fp8_block.fp8_g128,epilogue=silu_mul,codes=true",
            "m=2,n=40,k=16384,w=fp8_ch.fp8_token,codes=true",
            "m=130,n=264,k=1008,x=fp16,w=fp8.fp8,epilogue=bias+residual+silu_mul,codes=true",
        ),
    ),
)
