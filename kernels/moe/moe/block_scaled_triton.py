"""MoE over block-scaled codes in Triton: moe_mx_triton, moe_nvfp4_triton.

As moe_fp4_sm120 (block_scaled_sm120/spec.py): tokens are quantized once, and gathered as codes by the first product, whose epilogue has biases and
silu(gate) · up; its rows are quantized in turn. Products are those of grouped_linear_mx_triton and grouped_linear_nvfp4_triton.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.block_scaled_triton.kernel import FEATURES, schemes_of
from gristmill.kernels.moe import _block_scaled_chain, _chain
from gristmill.kernels.moe.grouped_linear.block_scaled_triton import product, refusal, tiles_for

if TYPE_CHECKING:
    from gristmill.kernels.calls import MoeCall


def launch(config: Config, call: MoeCall) -> None:
    """x [T, H] -> out [T, H]; without a workspace it allocates one. No synchronisation."""
    form = str(QuantScheme.parse(str(config["scheme"])).activation)
    _block_scaled_chain.run(form, partial(product, config), partial(product, config), call)


def accepts(schemes: tuple[str, ...], problem: Problem) -> str | None:
    """None, or the reason why not."""
    h, i = problem.integers(*"hi")
    return refusal(schemes, problem, H=h, I=i)


def config(problem: Problem, target: Target) -> Config:
    """Tiles with as many rows as an expert has on average."""
    m, top_k, e = problem.integers("m", "top_k", "e")
    return tiles_for(str(QuantScheme.parse(problem.text("w"))), cdiv(m * top_k, e), target)


EXAMPLES = (
    "m=0,top_k=2,e=3,h=32,i=32,w={w}",
    "m=9,top_k=3,e=5,h=96,i=64,w={w}",
    "m=70,top_k=2,e=4,h=64,i=160,x=fp16,w={w},epilogue=w13_bias+w2_bias+clamp",
    "m=33,top_k=1,e=1,h=128,i=96,x=fp32,w={w},epilogue=w2_bias",
)
KERNELS = tuple(
    Kernel(
        op="moe",
        name=f"moe_{name}_triton",
        provider="gristmill",
        language="triton",
        target=f"{__name__}:launch",
        requires=Requirement(features=features, code="triton"),
        summary="tokens quantized once and gathered as codes; both operands to block-scaled tensor cores; biases and activation as epilogues",
        accepts=partial(accepts, schemes_of(name)),
        config=config,
        reads=_chain.ORDER,
        workspace=_block_scaled_chain.workspace,
        layouts=("plain_v1",),
        examples=tuple(example.format(w=w) for w in schemes_of(name) for example in EXAMPLES),
        priority=52,
    )
    for name, features in FEATURES.items()
)
