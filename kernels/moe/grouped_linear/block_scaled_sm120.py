"""grouped_linear_fp4_sm120, grouped_linear_mxfp8_sm120: experts in NVFP4, MXFP4 or MXFP8 for GPUs with block-scaled mma.sync, by the products of
moe_fp4_sm120 and moe_mxfp8_sm120 (`moe/block_scaled_sm120`). Rows past those of the last expert are zeroed by a launch of Triton."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.block_scaled_sm120.shapes import COLUMNS
from gristmill.kernels.linear.block_scaled_sm120.spec import FP4, FP8
from gristmill.kernels.moe.moe.block_scaled_sm120 import shapes

if TYPE_CHECKING:
    from gristmill.kernels.calls import GroupedLinearCall


def launch(config: Config, call: GroupedLinearCall) -> None:
    """Rows [R, K] fp16 or bf16, in the order of experts or gathered by a permutation, six tensors of plain_v1 -> out [P, N or N / 2]."""
    from gristmill.kernels.moe._chain import carve
    from gristmill.kernels.moe.grouped_linear.block_scaled_triton import clear
    from gristmill.kernels.moe.moe.block_scaled_sm120._launch import product

    room = carve(None, call.x, shapes.rows_bytes(str(config["format"]), *call.x.shape))
    product(config, room, call)
    clear(call)


def _refusal(schemes: dict[str, str], problem: Problem) -> str | None:
    """None, or the reason why not."""
    scheme, (e, n, k) = QuantScheme.parse(problem.text("w")), problem.integers(*"enk")
    if str(scheme) not in schemes:
        return f"multiplies {' and '.join(schemes)}, not {scheme}"
    if problem["act_order"]:
        return "takes groups of neighbouring columns, not act-order"
    if problem.text("x") not in ("fp16", "bf16"):
        return f"takes fp16 or bf16 activations, not {problem.text('x')}"
    if e > shapes.MAX_EXPERTS or e * n >= 2**31:
        return f"made for up to {shapes.MAX_EXPERTS} experts, whose rows int32 numbers, not {e} of {n} rows"
    rows = 32 if "silu_mul" in problem.flags("epilogue") else 8
    if k % COLUMNS or n % rows:
        return f"needs K a multiple of {COLUMNS} and N of {rows}, got N={n}, K={k}"
    return None


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """The default shape, then every other one."""
    form, (m, e) = QuantScheme.parse(problem.text("w")).weights, problem.integers("m", "e")
    return ({"format": form, **one} for one in shapes.configs(form, m, e, target.multiprocessors))


def config(problem: Problem, target: Target) -> Config:
    """The shape for the rows that an expert has on average."""
    return next(iter(space(problem, target)))


EXAMPLES = (
    "m=0,e=3,n=64,k=128,w={w}",
    "m=70,e=5,n=72,k=384,w={w},epilogue=bias",
    "m=40,e=40,n=256,k=128,x=fp16,w={w},gather=3,epilogue=bias+clamp+silu_mul",
    "m=130,e=1,n=512,k=256,w={w},epilogue=silu_mul",
)
KERNELS = tuple(
    Kernel(
        op="grouped_linear",
        name=name,
        provider="gristmill",
        language="cuda",
        target=f"{__name__}:launch",
        requires=Requirement(
            features=(frozenset({"mma.sync.block_scale", "cp_async", "ldmatrix"}),),
            vendors=("nvidia",),
            code="cuda:compute_120f",
            packages=(("triton", "3.6"),),
        ),
        summary="rows quantized once and gathered as codes; linear's tiles over a list made on the device; every epilogue",
        accepts=partial(_refusal, schemes),
        config=config,
        space=space,
        layouts=("plain_v1",),
        examples=tuple(example.format(w=w) for w in schemes for example in EXAMPLES),
        priority=104,
    )
    for name, schemes in (("grouped_linear_fp4_sm120", FP4), ("grouped_linear_mxfp8_sm120", FP8))
)
