"""MoE with e4m3 weights and activations for Hopper: per tensor or channel and token, and in blocks of 128.

permute; tokens quantized once, unless they are given as codes, and copied to their experts; first product; silu(gate) · up quantized;
second product; combine. Six launches, and each begins during the one before. Gate and up are rounded to x's dtype, as silu(gate) · up is
before it is quantized. Weights stay as checkpoints have them, in plain_v1.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.common import ITEM_BYTES
from gristmill.kernels.linear.w8a8_sm90.shapes import Operands
from gristmill.kernels.moe import _chain
from gristmill.kernels.moe.combine.op import OP as COMBINE
from gristmill.kernels.moe.moe.w8a8_sm90 import shapes

if TYPE_CHECKING:
    from torch import Tensor

    from gristmill.kernels.calls import MoeCall

PROCESSORS = 132
FIELDS = ("tile_a", "tile_b", "plain", "slots", "ctas", "grid")


def launch(config: Config, call: MoeCall) -> None:
    """x [T, H] -> out [T, H]; without a workspace it allocates one. No synchronisation."""
    from gristmill.kernels.moe import steps_sm90 as steps
    from gristmill.kernels.moe.moe.w8a8_sm90 import _launch

    x = call.x

    if call.w13_bias is not None or call.w2_bias is not None or call.clamp:
        raise ValueError("moe_w8a8_sm90 has no biases and no clamped activation; moe_chain_torch does")
    operands, entries = operands_named(str(config["format"])), call.ids.numel()
    (tokens, hidden), (inner, experts) = x.shape, _chain.sizes_of(call.w13, call.inter)
    _launch.check_weight(operands, call.w13, experts, 2 * inner, hidden)
    _launch.check_weight(operands, call.w2, experts, hidden, inner)
    if not tokens:
        return
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        raise ValueError(
            f"moe_w8a8_sm90: rows of x must be contiguous and start at multiples of 16 bytes, got strides {x.stride()}"
        )
    space = views(operands, call.workspace, x, entries, experts, inner)
    offsets, _, inverse = _chain.ordered(call, experts, space[:3], partial(steps.permute, {}))
    order = _launch.Sorted(call.ids, offsets, inverse)
    if call.codes is None or call.scales is None:
        _launch.quantize(operands, x, order, hidden, space.tokens, space.token_scales, gated=False)
    else:
        _launch.place_codes(operands, call.codes, call.scales, order, space.tokens, space.token_scales)
    _launch.product(
        operands,
        shape_of(config, 1),
        space.tokens,
        space.token_scales,
        call.w13,
        offsets,
        space.gate_up,
    )
    _launch.quantize(
        operands, space.gate_up, order, inner, space.activations, space.activation_scales, gated=True
    )
    _launch.product(
        operands,
        shape_of(config, 2),
        space.activations,
        space.activation_scales,
        call.w2,
        offsets,
        space.rows,
    )
    steps.combine({}, COMBINE.Call(space.rows, inverse, call.weights, call.out))


def operands_named(name: str) -> Operands:
    """The operands of a format or scheme; ValueError if there are none."""
    operands = shapes.operands_of(name)
    if operands is None:
        raise ValueError(f"moe_w8a8_sm90 multiplies {', '.join(shapes.SCHEMES)}, not {name}")
    return operands


def shape_of(config: Config, product: int) -> dict[str, int]:
    """The fields of a product's shape, without the number that ends their names."""
    return {name: int(config[f"{name}{product}"]) for name in FIELDS}


class Views(NamedTuple):
    """The intermediate tensors of a call: offsets [experts + 1], permutation and inverse [T * K], all int32; rows sorted by expert:
    codes of tokens [T * K, H] and of activations [T * K, I] with float32 scales, gate and up [T * K, 2 I] and results [T * K, H] in
    x's dtype. rows share memory with tokens and gate_up, which are not needed any more."""

    offsets: Tensor
    permutation: Tensor
    inverse: Tensor
    tokens: Tensor
    token_scales: Tensor
    gate_up: Tensor
    activations: Tensor
    activation_scales: Tensor
    rows: Tensor


def views(
    operands: Operands, space: Tensor | None, x: Tensor, entries: int, experts: int, inner: int
) -> Views:
    """The intermediate tensors in a workspace, or in a new allocation when it is None."""
    import torch

    hidden, item = x.shape[1], x.element_size()
    offsets, permutation, inverse, token_scales, activations, activation_scales, shared = _chain.carve(
        space, x, pieces(operands, entries, experts, hidden, inner, item)
    )
    start = _chain.aligned(entries * hidden)
    return Views(
        offsets.view(torch.int32),
        permutation.view(torch.int32),
        inverse.view(torch.int32),
        shared[: entries * hidden].view(entries, hidden),
        token_scales,
        shared[start : start + 2 * entries * inner * item].view(x.dtype).view(entries, 2 * inner),
        activations.view(entries, inner),
        activation_scales,
        shared[: entries * hidden * item].view(x.dtype).view(entries, hidden),
    )


def pieces(
    operands: Operands, entries: int, experts: int, hidden: int, inner: int, item: int
) -> tuple[int, ...]:
    """Bytes of offsets, permutation, inverse, scales of tokens, codes and scales of activations, and of what shares memory: codes of
    tokens and gate and up; rows of results."""
    return (
        4 * (experts + 1),
        4 * entries,
        4 * entries,
        shapes.scale_bytes(operands, entries, experts, hidden),
        entries * inner,
        shapes.scale_bytes(operands, entries, experts, inner),
        max(_chain.aligned(entries * hidden) + 2 * entries * inner * item, entries * hidden * item),
    )


def workspace(problem: Problem, config: Config) -> Workspace:
    """Bytes of all intermediate tensors."""
    m, top_k, e, h, i = problem.integers("m", "top_k", "e", "h", "i")
    sizes = pieces(operands_named(problem.text("w")), m * top_k, e, h, i, ITEM_BYTES[problem.text("x")])
    return Workspace(_chain.room(sizes))


def accepts(problem: Problem) -> str | None:
    """None, or the reason why not."""
    if problem["act_order"]:
        return "takes no weights with act-order"
    beside = problem.flags("epilogue")
    if beside:
        return f"its epilogue is silu(gate) · up alone, without {' and '.join(beside)}"
    scheme, x, (e, h, i) = QuantScheme.parse(problem.text("w")), problem.text("x"), problem.integers(*"ehi")
    return shapes.refusal(scheme, x, e, 2 * i, h) or shapes.refusal(scheme, x, e, h, i)


def _config(problem: Problem, target: Target, first: shapes.Choice, second: shapes.Choice) -> Config:
    operands, processors = operands_named(problem.text("w")), target.multiprocessors or PROCESSORS
    fields: dict[str, int | float | str | bool] = {"format": operands.format}
    for number, choice in ((1, first), (2, second)):
        for name, value in shapes.config_of(operands, choice, problem.integer("e"), processors).items():
            fields[f"{name}{number}"] = value
    return fields


def _default(problem: Problem) -> tuple[shapes.Choice, shapes.Choice]:
    m, top_k, e = problem.integers("m", "top_k", "e")
    choice = shapes.choice_for(m * top_k, e)
    return choice, choice


def config(problem: Problem, target: Target) -> Config:
    """The shapes of both products, by the rows that an expert has on average."""
    return _config(problem, target, *_default(problem))


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Every shape for one product beside the default of the other."""
    first, second = _default(problem)
    tried = [(first, second)]
    tried += [(choice, second) for choice in shapes.choices() if choice != first]
    tried += [(first, choice) for choice in shapes.choices() if choice != second]
    for pair in tried:
        yield _config(problem, target, *pair)


KERNEL = Kernel(
    op="moe",
    name="moe_w8a8_sm90",
    provider="gristmill",
    language="cuda",
    target=f"{__name__}:launch",
    requires=Requirement(features=(frozenset({"wgmma", "tma"}),), vendors=("nvidia",), code="cuda:sm_90a"),
    summary="e4m3 tokens sorted by expert, products on tiles found on the device, silu(gate) * up quantized between them; 6 launches",
    accepts=accepts,
    supports=("codes",),
    config=config,
    space=space,
    reads=_chain.ORDER,
    workspace=workspace,
    layouts=("plain_v1",),
    examples=(
        "m=9,top_k=3,e=5,h=128,i=128,w=fp8_block.fp8_g128",
        "m=70,top_k=2,e=4,h=272,i=400,x=fp16,w=fp8_block.fp8_g128",
        "m=33,top_k=2,e=4,h=256,i=384,w=fp8_ch.fp8_token",
        "m=40,top_k=4,e=6,h=96,i=80,x=fp16,w=fp8.fp8_token",
        "m=70,top_k=2,e=4,h=272,i=400,w=fp8_block.fp8_g128,codes=true",
        "m=33,top_k=3,e=4,h=256,i=384,x=fp16,w=fp8_ch.fp8_token,codes=true",
    ),
    waits=True,
    triggers=True,
    priority=108,
)
