"""Linear with 8-bit weights and 8-bit activations for Hopper: e4m3 per tensor, per channel and token, and per block; int8 per
channel and token.

x is quantized by the rules of `quant/activations.py` in one launch (`_quantize_rows_sm90.cu`) and multiplied in the next
(`product.cuh`). Weights stay as checkpoints have them, in plain_v1. e4m3 products of 128 columns are added to float32 sums (the
two-level accumulation of DeepSeek-V3), because the tensor core keeps about 14 bits of a sum; int8 sums are exact.
docs/performance/linear_w8a8.md has the measurements.
"""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import BLOCK, QuantScheme, cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.w8a8_sm90.shapes import SCHEMES, operands_of, ranked, workspace_bytes

LONGEST_K = 1 << 16
"""int32 holds the sum of so many products of codes up to 255 and 128."""
PROCESSORS = 132


def accepts(problem: Problem) -> str | None:
    """The schemes of `SCHEMES`, fp16 or bf16, columns in order, rows of whole 16 bytes."""
    scheme, k = str(QuantScheme.parse(problem.text("w"))), problem.integer("k")
    if scheme not in SCHEMES:
        return f"multiplies {', '.join(SCHEMES)}, not {scheme}"
    if problem.text("x") not in ("fp16", "bf16"):
        return f"takes fp16 or bf16 activations, not {problem.text('x')}"
    if problem["act_order"]:
        return "takes no act-order"
    if problem["codes"] and operands_of(scheme).sums:
        return "needs the sums of int8 codes, which are not given with them"
    if k % 16 or k > LONGEST_K:
        return f"copies rows of whole 16 bytes: needs K a multiple of 16 and at most {LONGEST_K}, got K={k}"
    return None


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Every shape of a CTA that suits the problem, best first by the model."""
    operands, (m, n, k) = operands_of(problem.text("w")), problem.integers(*"mnk")
    processors = target.multiprocessors or PROCESSORS
    for _, candidate in ranked(operands, max(m, 1), n, k, processors):
        yield {"format": operands.format, **candidate}


def config(problem: Problem, target: Target) -> Config:
    """The first of `space`."""
    return next(iter(space(problem, target)))


def misfit(problem: Problem, config: Config) -> str | None:
    """None, or why the CTAs of a cluster cannot share the K of `problem`."""
    split, blocks = int(config["split"]), cdiv(problem.integer("k"), BLOCK)
    return None if split <= blocks else f"{split} CTAs cannot share {blocks} blocks of {BLOCK} columns"


def estimate(problem: Problem, target: Target) -> float | None:
    """Microseconds on an H200, quantization of x included unless codes are given."""
    operands, (m, n, k) = operands_of(problem.text("w")), problem.integers(*"mnk")
    product = ranked(operands, max(m, 1), n, k, target.multiprocessors or PROCESSORS)[0][0]
    return product if problem["codes"] else product + 2.0 + 3 * m * k / 3.5e6


def workspace(problem: Problem, config: Config) -> Workspace:
    """Quantized rows of x, and gate and up before they are multiplied."""
    m, n, k = problem.integers(*"mnk")
    gated = n if "silu_mul" in problem.flags("epilogue") else 0
    return Workspace(workspace_bytes(operands_of(problem.text("w")), m, k, gated, bool(problem["codes"])))


KERNEL = Kernel(
    op="linear",
    name="linear_w8a8_sm90",
    provider="gristmill",
    language="cuda",
    target="gristmill.kernels.linear.w8a8_sm90._launch:launch",
    requires=Requirement(features=(frozenset({"wgmma", "tma"}),), vendors=("nvidia",), code="cuda:sm_90a"),
    summary="x quantized in a launch of its own; both operands of wgmma from shared memory, warp-specialised, two-level sums",
    accepts=accepts,
    supports=("codes",),
    config=config,
    space=space,
    misfit=misfit,
    workspace=workspace,
    estimate=estimate,
    layouts=("plain_v1",),
    examples=(
        "m=0,n=64,k=128,w=fp8_ch.fp8_token",
        "m=1,n=64,k=128,w=fp8.fp8_token",
        "m=7,n=257,k=2880,w=fp8_block.fp8_g128,epilogue=bias",
        "m=257,n=130,k=272,x=fp16,w=fp8_ch.fp8_token,epilogue=bias+residual",
        "m=33,n=200,k=640,w=fp8_block.fp8_g128,epilogue=silu_mul",
        "m=65,n=6,k=1168,w=int8_ch.int8_token,epilogue=bias+silu_mul",
        "m=16,n=2112,k=1024,x=fp16,w=int8_ch.int8_token",
        "m=1,n=64,k=128,w=fp8.fp8_token,codes=true",
        "m=257,n=130,k=272,x=fp16,w=fp8_ch.fp8_token,epilogue=bias+residual,codes=true",
        "m=33,n=200,k=656,w=fp8_block.fp8_g128,epilogue=silu_mul,codes=true",
    ),
    waits=True,
    triggers=True,
    priority=108,
    proven="sm_90: H200",
)
