"""Products of experts over block-scaled codes in CuTe DSL for data-centre Blackwell (`_experts_sm100.py`): sizes and tiles, and the launch, which
quantizes rows of x by launches of Triton first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, ConfigValue
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme, cdiv, next_power_of_2
from gristmill.kernel_registry.target import Target
from gristmill.kernels.common import need
from gristmill.kernels.cutedsl import PACKAGES, CuteDslCase, program
from gristmill.kernels.cutedsl.devices import PROCESSORS
from gristmill.kernels.lazy_triton import jit, tl
from gristmill.kernels.linear.block_scaled_cutedsl.shapes import FORMS, GROUPS, ROWS, TILE_BYTES, TILES
from gristmill.kernels.linear.block_scaled_triton.quantize import OPERANDS, quantize
from gristmill.kernels.moe._block_scaled_chain import sizes_of_rows
from gristmill.kernels.moe._swiglu_triton import swiglu

if TYPE_CHECKING:
    from torch import Tensor

    from gristmill.kernels.calls import GroupedLinearCall

BUILD = "gristmill.kernels.moe.grouped_linear.block_scaled_cutedsl._experts_sm100:experts_product"
REQUIRES = Requirement(
    features=(frozenset({"tcgen05", "mma.block_scale", "tma"}),),
    vendors=("nvidia",),
    packages=(*PACKAGES, ("triton", "")),
    code="cutedsl:sm_100f",
)


def refusal(w: str, x: str, experts: int, n: int, k: int, gated: bool) -> str | None:
    """Why a product of these types and of E experts' W [N, K] is refused; None if it is not."""
    scheme = str(QuantScheme.parse(w))
    if scheme not in FORMS:
        return f"multiplies {', '.join(FORMS)}, not {scheme}"
    if x not in ("fp16", "bf16"):
        return f"takes fp16 or bf16 activations, not {x}"
    form, columns = FORMS[scheme], n // 2 if gated else n
    if k % form.divisor or not k:
        what = "codes of 4 bits that TMA spreads to bytes" if form.mixed else "whole 16 bytes of a row"
        return f"copies {what}: needs K a multiple of {form.divisor}, got K={k}"
    if columns % 8:
        return f"writes whole 16 bytes of a row: needs y's columns in multiples of 8, got {columns}"
    if experts * n >= 2**31:
        return f"numbers the rows of all experts in int32, and {experts} experts of {n} rows have more"
    return None


def tiles(rows: int, experts: int, n: int, gated: bool, processors: int) -> list[int]:
    """BN, best first: the widest tiles that give every multiprocessor one, where experts share rows evenly, else as many as there can be. Where the
    program gates, gate and up are 128 rows each."""
    if gated:
        return [2 * ROWS]
    active = max(1, min(experts, rows))
    high = active * cdiv(cdiv(rows, active), ROWS)
    first = max((bn for bn in TILES if high * cdiv(n, bn) >= processors), default=TILES[0])
    return [first, *(bn for bn in TILES if bn != first)]


def configs(
    scheme: str, rows: int, experts: int, n: int, epilogue: str, gather: bool, x: str, target: Target
) -> Iterator[dict[str, ConfigValue]]:
    """Configurations of a product for `rows` rows in all, best first.

    Gate and up of a tile begin at tiles of scales. Where N / 2 is no multiple of their rows, gating follows in a launch of its own.
    """
    processors, flags = target.multiprocessors or PROCESSORS, epilogue.split("+")
    gated = "silu_mul" in flags
    if gated and n % (2 * ROWS):
        gated, epilogue = False, "bias" if "bias" in flags else "none"
    for bn in tiles(rows, experts, n, gated, processors):
        yield {
            "scheme": scheme,
            "bn": bn,
            "slots": FORMS[scheme].slots(bn),
            "epilogue": epilogue,
            "gather": gather,
            "x": x,
            "ctas": processors,
            "arch": target.nvcc_arch or "sm_100a",
        }


@jit
def gate_kernel(z, out, n, alpha, limit, CLAMP: tl.constexpr, BLOCK: tl.constexpr):
    """silu(gate) · up of rows of 2 n numbers, gate first, or its clamped form."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(z + row * 2 * n + columns, mask=columns < n, other=0.0).to(tl.float32)
    up = tl.load(z + row * 2 * n + n + columns, mask=columns < n, other=0.0).to(tl.float32)
    y = swiglu(gate, up, alpha, limit, CLAMP)
    tl.store(out + row * n + columns, y.to(out.dtype.element_ty), mask=columns < n)


def product(config: Config, room: Tensor, call: GroupedLinearCall) -> None:
    """Rows [R, K] fp16 or bf16, in the order of experts or gathered by a permutation, the three tensors of scales128x4_v1 -> out [P, N or N / 2].

    Rows past those of the last expert are zero. Compiles at first use.

    Args:
        room: bytes for the codes, scales and factors of the R rows (`sizes_of_rows`).

    Raises:
        ValueError: tensors that are not those of a weight in the format.
    """
    import torch

    x, (codes, scales, row_scale), name = call.x, call.weight, str(config["scheme"])
    scheme, (given, k), (rows, columns) = QuantScheme.parse(name), x.shape, call.out.shape
    experts, n = call.expert_offsets.shape[0] - 1, columns * (2 if call.silu_mul else 1)
    of_x, form = OPERANDS[str(scheme.activation)], FORMS[name]
    shape = [experts, n, scheme.code_bytes(k)]
    tiled = [experts, cdiv(n, ROWS), cdiv(k // form.group, GROUPS), TILE_BYTES]
    factors = experts * n if scheme.has_global else 0
    need(
        (list(codes.shape), list(scales.shape), row_scale.numel()) == (shape, tiled, factors),
        f"experts of {name}: expected codes {shape}, scales {tiled} and {factors} multipliers of rows, "
        f"got {list(codes.shape)}, {list(scales.shape)} and {row_scale.numel()}",
    )
    if not rows:
        return
    from gristmill.kernels.moe.grouped_linear.block_scaled_cutedsl._experts_sm100 import experts_product

    x_codes, x_scales, x_factors = room.split([*sizes_of_rows(str(scheme.activation), given, k)])
    quantize(of_x, x, given, k, x_codes, x_scales, x_factors.view(torch.float32), tiled=True, by_row=True)
    count, unread = cdiv(given, ROWS) * cdiv(k // of_x.group, GROUPS), call.expert_offsets.view(torch.float32)
    width, wide = k // of_x.packed, cdiv(n, int(config["bn"]))
    follows = call.silu_mul and "silu_mul" not in str(config["epilogue"]).split("+")
    y = torch.empty(rows, n, dtype=x.dtype, device=x.device) if follows else call.out
    # Each expert wastes less than one tile.
    high = min(rows, cdiv(rows, ROWS) + experts)
    program(experts_product, config)(
        x_codes[: given * width].view(given, width),
        x_scales[: count * TILE_BYTES].view(torch.int32).view(count, ROWS),
        codes.flatten(0, 1),
        scales.flatten(0, 1),
        x_factors.view(torch.float32)[:given] if scheme.has_global else unread,
        row_scale.view(-1) if scheme.has_global else unread,
        y.view(-1) if call.bias is None else call.bias.view(-1),
        call.expert_offsets,
        call.expert_offsets if call.permutation is None else call.permutation,
        y,
        call.top_k,
        min(int(config["ctas"]), high * wide),
        call.alpha,
        call.limit,
    )
    if follows:
        block = min(1024, next_power_of_2(columns))
        gate_kernel[(rows, cdiv(columns, block))](
            y, call.out, columns, call.alpha, call.limit, CLAMP=call.clamp, BLOCK=block
        )


def aot(target: Target) -> list[CuteDslCase]:
    """Schemes, tiles, epilogues and gathers that differ in code. The Triton kernels of experts have the quantizers of x among their cases."""
    cases = (
        ("nvfp4.nvfp4", 256, "silu_mul", True),
        ("nvfp4.nvfp4", 256, "none", False),
        ("nvfp4.nvfp4", 64, "none", False),
        ("mxfp4.mxfp4", 256, "bias+clamp+silu_mul", True),
        ("mxfp4.mxfp4", 128, "bias", False),
        ("mxfp8.mxfp8", 256, "silu_mul", True),
        ("mxfp8.mxfp8", 128, "none", False),
        ("mxfp4.mxfp8", 256, "bias+silu_mul", True),
        ("mxfp4.mxfp8", 64, "bias", False),
    )
    made = []
    for scheme, bn, epilogue, gather in cases:
        # As many rows and columns as make the tile the best one.
        every = configs(scheme, 1, 1, 2 * ROWS, epilogue, gather, "bf16", target)
        config = next(config for config in every if config["bn"] == bn)
        name = f"{scheme.replace('.', '_')}_{bn}_{epilogue.replace('+', '_')}{'_gather' if gather else ''}"
        made.append(CuteDslCase(name, BUILD, config, ("tcgen05", "block_scaled", "tma")))
    return made
