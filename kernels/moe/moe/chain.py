"""MoE as a chain of operations: in torch on any device, in Triton on devices that Triton supports."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme, next_power_of_2
from gristmill.kernel_registry.target import Target
from gristmill.kernels.common import ITEM_BYTES
from gristmill.kernels.given_codes import dequantized
from gristmill.kernels.linear.triton import accepts_dense, accepts_quantized, step_along_k
from gristmill.kernels.moe import _chain
from gristmill.kernels.moe.moe._activated import activated, apart, is_swiglu

if TYPE_CHECKING:
    from torch import Tensor

    from gristmill.kernels.calls import GroupedLinearCall, MoeCall

TILE = ("bm", "bn", "bk", "warps", "stages")
"""Entries of a product's configuration: rows of x, rows of W and columns of a step, warps, depth of the pipeline."""
TILES = {
    16: (
        (64, 128, 4, 4),
        (64, 64, 4, 5),
        (128, 64, 4, 4),
        (32, 128, 4, 4),
        (64, 128, 4, 3),
        (32, 256, 4, 3),
        (128, 128, 8, 3),
    ),
    32: ((64, 64, 4, 4), (64, 128, 4, 3), (128, 64, 4, 4), (128, 128, 8, 3)),
    64: ((64, 64, 4, 4), (128, 64, 4, 4), (128, 64, 8, 4), (256, 64, 8, 3)),
    128: ((128, 64, 8, 4), (256, 64, 8, 3)),
}
"""bm -> tiles that are tried beside the default."""
SMALLEST_SHARED = 64 << 10
"""Bytes of shared memory that every target with matrix instructions has for a CTA."""


def launch_torch(config: Config, call: MoeCall) -> None:
    """x [T, H] -> out [T, H] through the torch parts; without a workspace it allocates one."""
    from gristmill.kernels.moe.combine import torch as combine_torch
    from gristmill.kernels.moe.grouped_linear import torch as grouped_linear_torch
    from gristmill.kernels.moe.permute import torch as permute_torch

    grouped = partial(grouped_linear_torch.launch, config)

    def first(grouped_call: GroupedLinearCall) -> None:
        if call.codes is None or call.scales is None:
            grouped(grouped_call)
            return
        scheme = QuantScheme.parse(str(config["scheme"]))
        values = dequantized(call.codes, call.scales, str(scheme.activation))
        floats = {"scheme": str(scheme.without_activation)}
        grouped_linear_torch.launch(floats, grouped_call.replace(x=values))

    def activate(z: Tensor, out: Tensor) -> None:
        out.copy_(activated(z.float(), call.activation, call.gated))

    permute, combine = partial(permute_torch.launch, {}), partial(combine_torch.launch, {})
    _run(call, _chain.Parts(permute, first, grouped, combine), activate)


def launch_triton(config: Config, call: MoeCall) -> None:
    """x [T, H] -> out [T, H] through the Triton parts; without a workspace it allocates one. No synchronisation."""
    from gristmill.kernels.activation.activation_triton import between_products
    from gristmill.kernels.moe.combine import triton as combine_triton
    from gristmill.kernels.moe.grouped_linear import triton as grouped_linear_triton
    from gristmill.kernels.moe.permute import triton as permute_triton

    first, second = (partial(grouped_linear_triton.launch, config_of(config, product)) for product in (1, 2))
    combine = partial(combine_triton.launch, combine_triton.block_config(call.x.shape[1]))
    parts = _chain.Parts(partial(permute_triton.launch, {}), first, second, combine)
    _run(call, parts, partial(between_products, call.activation, call.gated))


def config_of(config: Config, product: int) -> Config:
    """The tile of a product: that of both, but for entries whose name ends with its number."""
    own = {name: config.get(f"{name}{product}", config[name]) for name in TILE}
    return {**{name: value for name, value in config.items() if name in ("scheme", "be")}, **own}


def _run(call: MoeCall, parts: _chain.Parts, activate: Callable[[Tensor, Tensor], None]) -> None:
    """The chain. Another activation than silu(gate) · up, which is an epilogue of the first product, is a step after it."""
    if not is_swiglu(call):
        if not call.gated and not call.inter and call.w13[0].dim() == 3:
            call = call.replace(inter=call.w13[0].shape[1])
        parts = replace(parts, first=apart(call, parts.first, activate, _memory_of_z(call)))
    _chain.run(parts, call)


def _memory_of_z(call: MoeCall) -> Tensor | None:
    """In the workspace, for gate and up between the first product and the activation; None where there is no workspace or no gate."""
    if not call.gated or call.workspace is None:
        return None
    inner, experts = _chain.sizes_of(call.w13, call.inter)
    entries, item = call.ids.numel(), call.x.element_size()
    others = _chain.pieces(entries, experts, call.x.shape[1], inner, item)
    return _chain.carve(call.workspace, call.x, (*others, _bytes_of_z(entries, inner, item)))[-1]


def _bytes_of_z(entries: int, inner: int, item: int) -> int:
    return 2 * entries * inner * item


def workspace(problem: Problem, config: Config) -> Workspace:
    """Bytes of all intermediate tensors."""
    needed = _chain.workspace(problem, config)
    if not problem["gated"] or problem.text("activation") == "silu":
        return needed
    entries = problem.integer("m") * problem.integer("top_k")
    z = _bytes_of_z(entries, problem.integer("i"), ITEM_BYTES[problem.text("x")])
    return Workspace(needed.bytes + _chain.aligned(z))


def accepts(problem: Problem) -> str | None:
    """Weight-only and dense schemes."""
    activation = QuantScheme.parse(problem.text("w")).activation
    return None if activation is None else f"takes activations in their own dtype, not {activation}"


def accepts_named(problem: Problem) -> str | None:
    """Weight-only and dense schemes of ALL_WEIGHT_SCHEMES, which compiled kernels decode."""
    scheme = QuantScheme.parse(problem.text("w"))
    return accepts(problem) if scheme.is_named else f"decodes the schemes of ALL_WEIGHT_SCHEMES, not {scheme}"


def config(problem: Problem, target: Target) -> Config:
    """The scheme, which cannot be derived from packed tensors."""
    return {"scheme": problem.text("w")}


def config_triton(problem: Problem, target: Target) -> Config:
    """The same, with tiles for both products: as many rows as an expert has on average."""
    scheme, is_fp32 = QuantScheme.parse(problem.text("w")), problem.text("x") == "fp32"
    share = problem.integer("m") * problem.integer("top_k") // problem.integer("e")
    return {
        **config(problem, target),
        "be": next_power_of_2(problem.integer("e")),
        "bm": 16 if share <= 16 else 32 if share <= 64 else 64,
        "bn": 64,
        "bk": step_along_k(scheme, 32 if is_fp32 else 64),
        "warps": 4,
        "stages": 3,
    }


def space_triton(problem: Problem, target: Target) -> Iterable[Config]:
    """Tiles of as many rows as an expert has on average, and of more, since experts share rows unevenly: for both products, then for one.

    Tiles of 16-bit numbers on GPUs that take matrices from shared memory, as far as those fit.
    """
    base = dict(config_triton(problem, target))
    yield base
    if problem.text("x") == "fp32" or not target.features & {"mma.bf16", "wgmma", "tcgen05"}:
        return
    smallest, limit = int(base["bm"]), target.smem_bytes or SMALLEST_SHARED
    fitting = [
        (rows, tile)
        for rows, tiles in TILES.items()
        if smallest <= rows <= 4 * smallest
        for tile in tiles
        if _shared_bytes(rows, *tile) <= limit
    ]
    for rows, tile in fitting:
        yield base | dict(zip(TILE, (rows, *tile), strict=True))
    for rows, tile in fitting:
        if rows == smallest:
            for product in (2, 1):
                own = dict(zip(TILE, (rows, *tile), strict=True))
                yield base | {f"{name}{product}": own[name] for name in TILE if own[name] != base[name]}


def _shared_bytes(bm: int, bn: int, bk: int, warps: int, stages: int) -> int:
    """Of the pipeline of a tile, in 16-bit numbers."""
    return stages * (bm + bn) * bk * 2


def misfit(problem: Problem, config: Config) -> str | None:
    """None, or why a configuration does not run `problem`."""
    experts, block = problem.integer("e"), int(config.get("be", 0))
    return f"finds an expert among up to {block}, not {experts}" if 0 < block < experts else None


KERNELS = (
    Kernel(
        op="moe",
        name="moe_chain_torch",
        provider="torch",
        language="python",
        target=f"{__name__}:launch_torch",
        requires=Requirement(packages=(("torch", "2.11"),)),
        summary="permute, two grouped_linear, combine, all by torch; synchronises",
        supports=("codes", "activation", "gated"),
        capturable=False,
        config=config,
        reads=_chain.ORDER,
        workspace=workspace,
        layouts=("dense_v1", "plain_v1", "cpu_rows16_v1"),
        dequantizes=True,
    ),
    *(
        Kernel(
            op="moe",
            name=name,
            provider="gristmill",
            language="triton",
            target=f"{__name__}:launch_triton",
            requires=Requirement(code="triton"),
            summary=summary,
            accepts=accepted,
            config=config_triton,
            space=space_triton if layout == "dense_v1" else None,
            misfit=misfit,
            supports=("activation", "gated"),
            reads=_chain.ORDER,
            workspace=workspace,
            layouts=(layout,),
            priority=50,
        )
        for name, layout, accepted, summary in (
            (
                "moe_chain_triton",
                "dense_v1",
                accepts_dense,
                "permute, two grouped_linear, combine, all by Triton",
            ),
            ("moe_chain_w_triton", "plain_v1", accepts_quantized, "the same over quantized weights"),
        )
    ),
)
