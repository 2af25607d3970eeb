"""MoE with weights and activations in NVFP4, MXFP4 or MXFP8 for GPUs with block-scaled mma.sync: GeForce RTX 50, RTX PRO Blackwell (sm_120) and
GB10 (sm_121).

permute; tokens quantized once, in their own order; first product, which gathers their codes and scales, with biases and silu(gate) · up as
its epilogue; its rows quantized; second product; combine. Permute and combine are Triton's. Weights stay as checkpoints have them, in plain_v1.
NVFP4 has a factor for each row, so that a token's result does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, ConfigValue, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.common import ITEM_BYTES
from gristmill.kernels.linear.block_scaled_sm120.spec import FP4, FP8
from gristmill.kernels.moe import _chain
from gristmill.kernels.moe.moe.block_scaled_sm120 import shapes

if TYPE_CHECKING:
    from torch import Tensor

    from gristmill.kernels.calls import MoeCall

SHAPE = ("mt", "warps", "grid")
"""Entries of a product's configuration that differ between the products; here their names end with its number."""

EXAMPLES = (
    "m=0,top_k=2,e=3,h=128,i=128,w={w}",
    "m=9,top_k=3,e=5,h=128,i=256,w={w}",
    "m=70,top_k=2,e=4,h=384,i=128,x=fp16,w={w},epilogue=w13_bias+w2_bias+clamp",
    "m=130,top_k=1,e=1,h=256,i=128,w={w},epilogue=w2_bias",
    "m=40,top_k=8,e=64,h=128,i=128,w={w}",
)


def launch(config: Config, call: MoeCall) -> None:
    """x [T, H] -> out [T, H]; without a workspace it allocates one. No synchronisation."""
    from gristmill.kernels.moe.combine import triton as combine_triton
    from gristmill.kernels.moe.moe.block_scaled_sm120 import _launch
    from gristmill.kernels.moe.permute import triton as permute_triton

    if not call.x.shape[0]:
        return
    memory, rooms = parts(str(config["format"]), call)
    first, second = (partial(_launch.product, config_of(config, i + 1), rooms[i]) for i in range(2))
    combine = partial(combine_triton.launch, combine_triton.block_config(call.x.shape[1]))
    steps = _chain.Parts(partial(permute_triton.launch, {}), first, second, combine)
    _chain.run(steps, call.replace(workspace=memory))


def config_of(config: Config, product: int) -> Config:
    """The configuration of a product."""
    return {"format": config["format"], **{name: config[f"{name}{product}"] for name in SHAPE}}


def parts(format: str, call: MoeCall) -> tuple[Tensor, tuple[list[Tensor], list[Tensor]]]:
    """The memory of a call, whose beginning is the chain's, and the codes, scales and factors of its tokens, and of the rows between the
    products, which take the same bytes one after the other."""
    (tokens, hidden), entries = call.x.shape, call.ids.numel()
    inner, experts = _chain.sizes_of(call.w13, call.inter)
    sizes = (tokens, hidden), (entries, inner)
    chain = _chain.pieces(entries, experts, hidden, inner, call.x.element_size())
    flat = _chain.memory(call.workspace, call.x, (*chain, _quantized_bytes(format, *sizes)))
    room = _chain.carve(flat, call.x, (*chain, _quantized_bytes(format, *sizes)))[-1]
    return flat, (_split(format, room, *sizes[0]), _split(format, room, *sizes[1]))


def _split(format: str, room: Tensor, rows: int, k: int) -> list[Tensor]:
    sizes = shapes.rows_bytes(format, rows, k)
    return list(room[: _chain.room(sizes)].split([*map(_chain.aligned, sizes)]))


def _quantized_bytes(format: str, *of: tuple[int, int]) -> int:
    """Bytes of quantized rows of the largest of several [rows, K]."""
    return max(_chain.room(shapes.rows_bytes(format, *one)) for one in of)


def workspace(problem: Problem, config: Config) -> Workspace:
    """Bytes of the chain's intermediate tensors, and of quantized rows."""
    m, top_k, e, h, i = problem.integers("m", "top_k", "e", "h", "i")
    chain = _chain.pieces(m * top_k, e, h, i, ITEM_BYTES[problem.text("x")])
    return Workspace(_chain.room(chain) + _quantized_bytes(str(config["format"]), (m, h), (m * top_k, i)))


def _format(problem: Problem) -> str:
    return QuantScheme.parse(problem.text("w")).weights


def _refusal(schemes: dict[str, str], problem: Problem) -> str | None:
    """None, or the reason why not."""
    scheme = QuantScheme.parse(problem.text("w"))
    if str(scheme) not in schemes:
        return f"multiplies {' and '.join(schemes)}, not {scheme}"
    if problem["act_order"]:
        return "takes groups of neighbouring columns, not act-order"
    return shapes.refusal(problem.text("x"), *problem.integers("e", "h", "i"))


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """The default shape for both products, then every other one for both."""
    form, (m, top_k, e) = _format(problem), problem.integers("m", "top_k", "e")
    for one in shapes.configs(form, m * top_k, e, target.multiprocessors):
        both: Iterator[tuple[str, ConfigValue]] = (
            (f"{name}{product}", one[name]) for product in (1, 2) for name in SHAPE
        )
        yield {"format": form, **dict(both)}


def config(problem: Problem, target: Target) -> Config:
    """The shape for the rows that an expert has on average."""
    return next(iter(space(problem, target)))


KERNELS = tuple(
    Kernel(
        op="moe",
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
        summary="tokens quantized once and gathered as codes; linear's tiles over a list made on the device; biases and activation as epilogues",
        accepts=partial(_refusal, schemes),
        config=config,
        space=space,
        reads=_chain.ORDER,
        workspace=workspace,
        layouts=("plain_v1",),
        examples=tuple(example.format(w=w) for w in schemes for example in EXAMPLES),
        priority=104,
    )
    for name, schemes in (("moe_fp4_sm120", FP4), ("moe_mxfp8_sm120", FP8))
)
