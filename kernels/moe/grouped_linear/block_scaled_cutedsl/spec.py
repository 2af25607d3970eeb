"""grouped_linear_block_scaled_cutedsl_sm100: experts in NVFP4, MXFP4 or MXFP8 in CuTe DSL for data-centre Blackwell (`product.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.block_scaled_cutedsl.shapes import FORMS
from gristmill.kernels.moe._block_scaled_chain import room_of_rows
from gristmill.kernels.moe.grouped_linear.block_scaled_cutedsl import product

if TYPE_CHECKING:
    from gristmill.kernels.calls import GroupedLinearCall


def launch(config: Config, call: GroupedLinearCall) -> None:
    """Rows [R, K] fp16 or bf16, in the order of experts or gathered by a permutation, the tensors of scales128x4_v1 -> out [P, N or N / 2]. Compiles
    at first use."""
    product.product(config, room_of_rows(str(config["scheme"]), call.x), call)


def accepts(problem: Problem) -> str | None:
    """None, or the reason why not."""
    if problem["act_order"]:
        return "takes groups of neighbouring columns, not act-order"
    (e, n, k), gated = problem.integers(*"enk"), "silu_mul" in problem.flags("epilogue")
    return product.refusal(problem.text("w"), problem.text("x"), e, n, k, gated)


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Tiles, best first."""
    scheme, epilogue = str(QuantScheme.parse(problem.text("w"))), "+".join(sorted(problem.flags("epilogue")))
    m, e, n = problem.integers(*"men")
    x, gather = problem.text("x"), bool(problem["gather"])
    return product.configs(scheme, m, e, n, epilogue or "none", gather, x, target)


def config(problem: Problem, target: Target) -> Config:
    """The first of `space`."""
    return next(iter(space(problem, target)))


EXAMPLES = (
    "m=0,e=3,n=64,k=128,w={w}",
    "m=265,e=5,n=200,k=384,w={w},epilogue=bias",
    "m=40,e=40,n=256,k=128,x=fp16,w={w},gather=3,epilogue=bias+clamp+silu_mul",
    "m=300,e=1,n=512,k=256,w={w},epilogue=silu_mul",
    "m=80,e=3,n=320,k=128,w={w},gather=2,epilogue=bias+silu_mul",
)
KERNEL = Kernel(
    op="grouped_linear",
    name="grouped_linear_block_scaled_cutedsl_sm100",
    provider="gristmill",
    language="cutedsl",
    target=f"{__name__}:launch",
    aot="gristmill.kernels.moe.grouped_linear.block_scaled_cutedsl.product:aot",
    requires=product.REQUIRES,
    summary="rows quantized once and gathered as codes; persistent warp-specialized tcgen05 with block scales; every epilogue",
    accepts=accepts,
    config=config,
    space=space,
    layouts=("scales128x4_v1",),
    examples=(
        *(example.format(w=w) for w in FORMS for example in EXAMPLES),
        *(f"m=80,e=3,n=192,k=224,w={w},gather=2" for w, form in FORMS.items() if not form.mixed),
    ),
    priority=60,
)
