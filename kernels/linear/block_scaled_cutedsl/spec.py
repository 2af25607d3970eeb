"""linear_block_scaled_cutedsl_sm100: weights and activations in NVFP4, MXFP4 or MXFP8 in CuTe DSL for data-centre Blackwell (`_product_sm100.py`).

x is quantized by launches of Triton (`block_scaled_triton/quantize.py`), which put its scales into the tiles that tcgen05 takes; those of weights are
put there when a model is loaded (scales128x4_v1). The factor of NVFP4 is that of all rows of x.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, ConfigValue, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.cutedsl import PACKAGES, CuteDslCase, program
from gristmill.kernels.cutedsl.devices import PROCESSORS
from gristmill.kernels.linear.block_scaled_cutedsl.shapes import (
    FORMS,
    GROUPS,
    ROWS,
    TILE_BYTES,
    room_of,
    tiles,
)
from gristmill.kernels.linear.block_scaled_triton import quantize

if TYPE_CHECKING:
    from torch import Tensor

    from gristmill.kernels.calls import LinearCall

BUILD = "gristmill.kernels.linear.block_scaled_cutedsl._product_sm100:product"


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K] fp16 or bf16, the three tensors of scales128x4_v1 -> out [..., N or N / 2]. Compiles at first use.

    Raises:
        ValueError: tensors that are not those of a weight in the format; a workspace that is too small.
    """
    import torch

    from gristmill.kernels.common import need, need_workspace
    from gristmill.kernels.linear._epilogue import finish
    from gristmill.kernels.linear.block_scaled_cutedsl._product_sm100 import product

    x, (codes, scales, row_scale) = call.x, call.weight
    scheme, k, columns = str(config["scheme"]), x.shape[-1], call.out.shape[-1]
    rows, m = columns * (2 if call.silu_mul else 1), x.numel() // k
    of_w = QuantScheme.parse(scheme)
    shape, tiled = [rows, of_w.code_bytes(k)], [*_tiles(rows, k, FORMS[scheme].group), TILE_BYTES]
    need(
        (list(codes.shape), list(scales.shape)) == (shape, tiled)
        and row_scale.numel() == (rows if of_w.has_global else 0),
        f"linear of {scheme}: expected codes {shape}, scales {tiled} and {rows if of_w.has_global else 0} multipliers of rows, "
        f"got {list(codes.shape)}, {list(scales.shape)} and {row_scale.numel()}",
    )
    if m == 0:
        return
    room, space = room_of(scheme, m, k), call.workspace
    if space is None:
        space = torch.empty(room.size, dtype=torch.uint8, device=x.device)
    else:
        need_workspace("linear", space, room.size, x.device)
    x_codes, x_scales, factor = _quantized(scheme, x, space, m, k)
    gated = "silu_mul" in str(config["epilogue"]).split("+")
    follows = call.silu_mul and not gated
    y = torch.empty(m, rows, dtype=x.dtype, device=x.device) if follows else call.out.view(m, columns)
    residual = None if follows else call.residual
    if residual is not None and residual.data_ptr() % 16:
        residual = residual.clone()
    program(product, config)(
        x_codes,
        x_scales,
        codes,
        scales,
        factor,
        row_scale if of_w.has_global else factor,
        y.view(-1)[:1] if call.bias is None else call.bias,
        y if residual is None else residual.view(m, columns),
        y,
        min(int(config["ctas"]), cdiv(m, ROWS) * cdiv(rows, int(config["bn"]))),
    )
    if follows:
        finish(y.view(*x.shape[:-1], rows), None, call.residual, True, call.out)


def _tiles(rows: int, k: int, group: int) -> tuple[int, int]:
    """Tiles of scales down and across."""
    return cdiv(rows, ROWS), cdiv(cdiv(k, group), GROUPS)


def _quantized(scheme: str, x: Tensor, space: Tensor, m: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [M, bytes of K], tiles of scales, and float32 [1], NVFP4's factor."""
    import torch

    room, of_x = room_of(scheme, m, k), quantize.OPERANDS[str(QuantScheme.parse(scheme).activation)]
    codes, scales = space[: m * k // of_x.packed], space[room.scales : room.factor]
    factors = space[room.factor : room.size].view(torch.float32)
    quantize.quantize(of_x, x, m, k, codes, scales, factors, tiled=True)
    down, across = _tiles(m, k, of_x.group)
    tiled = scales[: down * across * TILE_BYTES].view(down, across, TILE_BYTES)
    return codes.view(m, k // of_x.packed), tiled, factors[:1]


def accepts(problem: Problem) -> str | None:
    """None, or the reason why not."""
    scheme, (n, k) = str(QuantScheme.parse(problem.text("w"))), problem.integers(*"nk")
    if scheme not in FORMS:
        return f"multiplies {', '.join(FORMS)}, not {scheme}"
    if problem.text("x") not in ("fp16", "bf16"):
        return f"takes fp16 or bf16 activations, not {problem.text('x')}"
    if problem["act_order"]:
        return "takes groups of neighbouring columns, not act-order"
    divisor = FORMS[scheme].divisor
    if k % divisor or n % 8:
        return f"copies whole 16 bytes of a row: needs K a multiple of {divisor} and N of 8, got N={n}, K={k}"
    if "silu_mul" in problem.flags("epilogue") and n % 16:
        return f"writes whole 16 bytes of a row: needs N / 2 a multiple of 8, got N={n}"
    return None


def space(problem: Problem, target: Target) -> Iterator[Config]:
    """Tiles, best first; what follows the sums; one CTA per multiprocessor."""
    (m, n), flags = problem.integers(*"mn"), problem.flags("epilogue")
    scheme, processors = str(QuantScheme.parse(problem.text("w"))), target.multiprocessors or PROCESSORS
    for bn, gated in tiles(m, n, "silu_mul" in flags, processors):
        # What is added after gating is added by the launch that gates.
        apart = () if gated or "silu_mul" not in flags else ("silu_mul", "residual")
        epilogue = "+".join(sorted(set(flags) - set(apart))) or "none"
        yield _config(scheme, bn, epilogue, problem.text("x"), processors, target)


def _config(
    scheme: str, bn: int, epilogue: str, x: str, processors: int, target: Target
) -> dict[str, ConfigValue]:
    return {
        "scheme": scheme,
        "bn": bn,
        "slots": FORMS[scheme].slots(bn),
        "epilogue": epilogue,
        "x": x,
        "ctas": processors,
        "arch": target.nvcc_arch or "sm_100a",
    }


def config(problem: Problem, target: Target) -> Config:
    """The first of `space`."""
    return next(space(problem, target))


def workspace(problem: Problem, config: Config) -> Workspace:
    """Quantized rows of x."""
    return Workspace(room_of(str(config["scheme"]), *problem.integers("m", "k")).size)


def aot(target: Target) -> list[CuteDslCase]:
    """Schemes, tiles and epilogues that differ in code. The Triton kernels have the quantizers of x among their cases."""
    cases = (
        ("nvfp4.nvfp4", 64, "none"),
        ("nvfp4.nvfp4", 128, "residual"),
        ("nvfp4.nvfp4", 256, "bias+residual+silu_mul"),
        ("mxfp4.mxfp4", 256, "bias"),
        ("mxfp8.mxfp8", 256, "none"),
        ("mxfp4.mxfp8", 128, "bias"),
        ("mxfp4.mxfp8", 256, "silu_mul"),
    )
    return [
        CuteDslCase(
            f"{scheme.replace('.', '_')}_{bn}_{epilogue.replace('+', '_')}",
            BUILD,
            _config(scheme, bn, epilogue, "bf16", PROCESSORS, target),
            ("tcgen05", "block_scaled", "tma"),
        )
        for scheme, bn, epilogue in cases
    ]


EXAMPLES = (
    "m=0,n=64,k=128,w={w}",
    "m=1,n=4112,k=4096,w={w}",
    "m=7,n=264,k=1152,x=fp16,w={w},epilogue=bias",
    "m=65,n=48,k=384,w={w},epilogue=bias+silu_mul",
    "m=257,n=136,k=256,x=fp16,w={w},epilogue=bias+residual",
    "m=300,n=1024,k=4096,w={w},epilogue=residual+silu_mul",
    "m=4096,n=4096,k=640,w={w}",
)
KERNEL = Kernel(
    op="linear",
    name="linear_block_scaled_cutedsl_sm100",
    provider="gristmill",
    language="cutedsl",
    target=f"{__name__}:launch",
    aot=f"{__name__}:aot",
    requires=Requirement(
        features=(frozenset({"tcgen05", "mma.block_scale", "tma"}),),
        vendors=("nvidia",),
        packages=(*PACKAGES, ("triton", "")),
        code="cutedsl:sm_100f",
    ),
    summary="x quantized in launches of its own; persistent warp-specialized tcgen05 with block scales in tensor memory",
    accepts=accepts,
    config=config,
    space=space,
    workspace=workspace,
    layouts=("scales128x4_v1",),
    examples=tuple(example.format(w=w) for w in FORMS for example in EXAMPLES),
    priority=60,
)
