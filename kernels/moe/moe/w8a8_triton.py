"""MoE with e4m3 weights and activations in Triton: moe_w8a8_triton, on every GPU that multiplies e4m3.

As moe_w8a8_sm90 (w8a8_sm90/spec.py): permute; tokens quantized once, unless they are given as codes, and gathered as codes by the first product,
whose epilogue has biases and silu(gate) · up; its rows, rounded to x's dtype, are quantized in turn; second product; combine. Products are
those of grouped_linear_w8a8_triton. Another activation is a step after the first product, as in moe_chain_triton.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.common import ITEM_BYTES
from gristmill.kernels.moe import _chain
from gristmill.kernels.moe._e4m3_rows_triton import Rows, bytes_of
from gristmill.kernels.moe.grouped_linear import w8a8_triton
from gristmill.kernels.moe.moe._activated import apart, is_swiglu

if TYPE_CHECKING:
    from gristmill.kernels.calls import MoeCall


def launch(config: Config, call: MoeCall) -> None:
    """x [T, H] -> out [T, H]; without a workspace it allocates one. No synchronisation."""
    from gristmill.kernels.activation.activation_triton import between_products
    from gristmill.kernels.moe.combine import triton as combine_triton
    from gristmill.kernels.moe.permute import triton as permute_triton

    if not call.x.shape[0]:
        return
    if not call.gated and not call.inter:
        call = call.replace(inter=call.w13[0].shape[1])
    inner, experts = _chain.sizes_of(call.w13, call.inter)
    (tokens, hidden), swiglu = call.x.shape, is_swiglu(call)
    sizes = pieces(
        str(QuantScheme.parse(str(config["scheme"])).activation),
        (tokens, call.ids.shape[1], experts, hidden, inner),
        call.x.element_size(),
        gate=call.gated and not swiglu,
    )
    memory = _chain.memory(call.workspace, call.x, sizes)
    room, z = _chain.carve(memory, call.x, sizes)[-2:]
    given = None if call.codes is None or call.scales is None else Rows(call.codes, call.scales)
    parts = _chain.Parts(
        partial(permute_triton.launch, {}),
        partial(w8a8_triton.product, config, room, given=given),
        partial(w8a8_triton.product, config, room),
        partial(combine_triton.launch, combine_triton.block_config(hidden)),
    )
    if not swiglu:
        activate = partial(between_products, call.activation, call.gated)
        parts = replace(parts, first=apart(call, parts.first, activate, z))
    _chain.run(parts, call.replace(workspace=memory))


def pieces(form: str, sizes: tuple[int, int, int, int, int], item: int, gate: bool) -> tuple[int, ...]:
    """Bytes of the chain's intermediate tensors, of quantized rows (tokens, then those between the products), and of gate and up where the
    activation is a step of its own; sizes: tokens, top_k, experts, hidden and inner."""
    tokens, top_k, experts, hidden, inner = sizes
    entries = tokens * top_k
    return (
        *_chain.pieces(entries, experts, hidden, inner, item),
        max(bytes_of(form, tokens, hidden), bytes_of(form, entries, inner)),
        2 * entries * inner * item if gate else 0,
    )


def workspace(problem: Problem, config: Config) -> Workspace:
    """Bytes of all intermediate tensors."""
    m, top_k, e, h, i = problem.integers("m", "top_k", "e", "h", "i")
    form, item = str(QuantScheme.parse(problem.text("w")).activation), ITEM_BYTES[problem.text("x")]
    gate = bool(problem["gated"]) and problem.text("activation") != "silu"
    return Workspace(_chain.room(pieces(form, (m, top_k, e, h, i), item, gate)))


def config(problem: Problem, target: Target) -> Config:
    """Tiles with as many rows as an expert has on average."""
    m, top_k, e = problem.integers("m", "top_k", "e")
    return w8a8_triton.tiles_for(problem.text("w"), cdiv(m * top_k, e), target)


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """The default, and one other number of rows, columns, warps and stages at a time."""
    return w8a8_triton.space_of(config(problem, target))


KERNEL = Kernel(
    op="moe",
    name="moe_w8a8_triton",
    provider="gristmill",
    language="triton",
    target=f"{__name__}:launch",
    requires=Requirement(features=w8a8_triton.FEATURES, code="triton"),
    summary="tokens quantized once and gathered as e4m3 codes; sums of 128 columns scaled and added in float32; biases and activation as epilogues",
    accepts=w8a8_triton.refusal,
    supports=("codes", "activation", "gated"),
    config=config,
    space=space,
    reads=_chain.ORDER,
    workspace=workspace,
    layouts=("plain_v1",),
    examples=(
        "m=0,top_k=2,e=3,h=32,i=32,w=fp8_block.fp8_g128",
        "m=9,top_k=3,e=5,h=128,i=128,w=fp8_block.fp8_g128",
        "m=70,top_k=2,e=4,h=272,i=400,x=fp16,w=fp8_block.fp8_g128,epilogue=w13_bias+w2_bias+clamp",
        "m=150,top_k=1,e=1,h=130,i=96,w=fp8_block.fp8_g128,epilogue=w2_bias",
        "m=70,top_k=2,e=4,h=272,i=400,w=fp8_block.fp8_g128,codes=true",
        "m=33,top_k=2,e=33,h=256,i=200,w=fp8_ch.fp8_token",
        "m=33,top_k=3,e=4,h=257,i=65,x=fp16,w=fp8_ch.fp8_token,codes=true",
        "m=40,top_k=4,e=6,h=96,i=80,x=fp16,w=fp8.fp8_token,epilogue=w13_bias",
        "m=9,top_k=2,e=4,h=140,i=130,w=fp8_block.fp8_g128,activation=relu2,gated=false,epilogue=w13_bias",
        "m=9,top_k=2,e=4,h=140,i=130,x=fp16,w=fp8_ch.fp8_token,activation=gelu_tanh",
    ),
    priority=52,
)
