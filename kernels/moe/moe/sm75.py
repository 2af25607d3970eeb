"""MoE over frag16 tiles for sm_75 (Turing): permute and combine in Triton, both products in CUDA C++ (grouped_linear_sm75). fp16 alone.

The first product gathers the rows of x by the permutation, and has biases and the activation as its epilogue.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.frag16_sm75.spec import REQUIRES
from gristmill.kernels.moe import _chain
from gristmill.kernels.moe.grouped_linear.frag16_sm75 import shapes
from gristmill.kernels.moe.grouped_linear.frag16_sm80.shapes import TILE_LAYOUTS

if TYPE_CHECKING:
    from gristmill.kernels.calls import MoeCall


def launch(config: Config, call: MoeCall) -> None:
    """x [T, H] -> out [T, H]; without a workspace it allocates one. No synchronisation."""
    from gristmill.kernels.moe.combine import triton as combine_triton
    from gristmill.kernels.moe.grouped_linear.frag16_sm75 import _launch
    from gristmill.kernels.moe.permute import triton as permute_triton

    product = partial(_launch.launch, config)
    combine = partial(combine_triton.launch, combine_triton.block_config(call.x.shape[1]))
    _chain.run(_chain.Parts(partial(permute_triton.launch, {}), product, product, combine), call)


def accepts(problem: Problem) -> str | None:
    """None, or the reason why not."""
    if problem["act_order"]:
        return "takes no weights with act-order"
    scheme, x, (e, h, i) = QuantScheme.parse(problem.text("w")), problem.text("x"), problem.integers(*"ehi")
    return shapes.refusal(scheme, x, e, 2 * i, h, True) or shapes.refusal(scheme, x, e, h, i, False)


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Every shape, for both products, the default first."""
    scheme, (m, top_k, e) = QuantScheme.parse(problem.text("w")), problem.integers("m", "top_k", "e")
    return shapes.configs(scheme, m * top_k, e, target.multiprocessors)


def config(problem: Problem, target: Target) -> Config:
    """The shape for the rows that an expert has on average."""
    return next(iter(space(problem, target)))


KERNEL = Kernel(
    op="moe",
    name="moe_sm75",
    provider="gristmill",
    language="cuda",
    target=f"{__name__}:launch",
    requires=replace(REQUIRES, packages=(("triton", "3.6"),)),
    summary="fp16: permute, two grouped_linear_sm75 with biases and activation as epilogues, combine",
    accepts=accepts,
    config=config,
    space=space,
    reads=_chain.ORDER,
    workspace=_chain.workspace,
    layouts=TILE_LAYOUTS,
    examples=(
        "m=9,top_k=3,e=5,h=128,i=128,x=fp16,w=int4_g128",
        "m=33,top_k=2,e=4,h=256,i=144,x=fp16,w=int4_g32_zp",
        "m=40,top_k=4,e=6,h=96,i=96,x=fp16,w=mxfp4,epilogue=w13_bias+w2_bias+clamp",
        "m=17,top_k=2,e=4,h=144,i=272,x=fp16,w=fp8_block",
        "m=70,top_k=3,e=4,h=128,i=64,x=fp16,w=int8_g32,epilogue=w2_bias",
    ),
    priority=55,
)
