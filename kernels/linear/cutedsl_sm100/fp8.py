"""FP8 weights with FP8 activations in CuTe DSL for data-centre Blackwell (`_fp8.py`), compiled on the user's machine.

x is quantized by a launch that `linear_w8a8_sm89` has, in PTX of compute_89, unless codes are given. Weights stay as checkpoints have them, in
plain_v1. Sums of blocks have two levels, those of rows one, which assumes that tensor memory keeps float32: no device has shown it here yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, ConfigValue, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.scheme import BLOCK, QuantScheme, cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.cutedsl import CuteDslCase, program
from gristmill.kernels.linear.cutedsl_sm100.shapes import BLOCKS, WHOLE, configs, requirement
from gristmill.kernels.linear.w8a8_sm80.shapes import Room, pitch_of

if TYPE_CHECKING:
    from torch import Tensor

    from gristmill.kernels.calls import LinearCall

SCHEMES = ("fp8.fp8_token", "fp8_ch.fp8_token", "fp8_block.fp8_g128")


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K] fp16 or bf16, the six tensors of plain_v1 -> out [..., N or N / 2]. Compiles at first use.

    Raises:
        ValueError: tensors that are not those of a weight in the scheme, in the order of x's columns, or a workspace that is too small.
        NativeLibraryError: this build has no PTX of compute_89.
        RuntimeError: no driver, one that does not take the PTX, or another error of the driver.
    """
    from gristmill.kernels.common import need
    from gristmill.kernels.linear.cutedsl_sm100._fp8 import fp8_product

    codes, w_scales, _, _, row_block, perm = call.weight
    k, columns = call.x.shape[-1], call.out.shape[-1]
    rows, m = columns * (2 if call.silu_mul else 1), call.x.numel() // k
    blocks = bool(config["blocks"])
    need(
        tuple(codes.shape) == (rows, k) and not perm.numel(),
        f"linear_fp8_cutedsl_sm100: expected codes [{rows}, {k}] in the order of x's columns, got {list(codes.shape)}"
        + (" and a permutation" if perm.numel() else ""),
    )
    need(
        row_block.numel() == (rows if blocks else 0)
        and (
            w_scales.dim() == 2 and w_scales.shape[1] == cdiv(k, BLOCK)
            if blocks
            else w_scales.numel() == rows
        ),
        "linear_fp8_cutedsl_sm100: expected scales "
        + (f"[block rows, {cdiv(k, BLOCK)}] with a block row" if blocks else "one")
        + f" for each of {rows} rows, got {list(w_scales.shape)} and {row_block.numel()} block rows",
    )
    if m == 0:
        return
    values, x_scales = _quantized(config, call, m, k)
    of_w = w_scales.float() if blocks else w_scales.float().reshape(-1, 1)
    out = call.out.view(m, columns)
    program(fp8_product, config)(
        values,
        codes,
        x_scales,
        of_w,
        row_block if blocks else of_w,
        out if call.bias is None else call.bias,
        out if call.residual is None else call.residual.reshape(m, columns),
        out,
        config["ctas"],
    )


def room_of(blocks: bool, m: int, k: int, given: bool) -> Room:
    """The parts of a workspace: codes of M rows of x, then scales, unless they are given."""
    scales = 0 if given else cdiv(m * k, 16) * 16
    end = scales + (0 if given else 4 * pitch_of(m) * (cdiv(k, BLOCK) if blocks else 1))
    return Room(0, 0, scales, end, end, end)


def _quantized(config: Config, call: LinearCall, m: int, k: int) -> tuple[Tensor, Tensor]:
    """Codes [M, K] as uint8, and scales [M, groups], those of a group behind each other, groups a multiple of 16 bytes apart."""
    import torch

    from gristmill.kernels.common import need_workspace
    from gristmill.kernels.linear.cutedsl_sm100._arguments import aligned_rows, pitched
    from gristmill.kernels.linear.w8a8_sm80._launch import rows_of
    from gristmill.kernels.linear.w8a8_sm80._launch_sm89 import quantize

    if call.codes is not None and call.scales is not None:
        return aligned_rows(call.codes.view(torch.uint8), m, k), pitched(call.scales)
    blocks = bool(config["blocks"])
    room = room_of(blocks, m, k, given=False)
    space = call.workspace
    if space is None:
        space = torch.empty(room.size, dtype=torch.uint8, device=call.x.device)
    need_workspace("linear", space, room.size, call.x.device)
    activation = {"activation": "fp8_g128" if blocks else "fp8_token"}
    quantize(activation, rows_of(call.x, m, k, space.data_ptr(), room))
    scales = space[room.scales : room.size].view(torch.float32).view(-1, pitch_of(m))
    return space[: m * k].view(m, k), scales.T[:m]


def accepts(problem: Problem) -> str | None:
    """None, or the reason why not."""
    scheme, (n, k) = str(QuantScheme.parse(problem.text("w"))), problem.integers(*"nk")
    if scheme not in SCHEMES:
        return f"multiplies {', '.join(SCHEMES)}, not {scheme}"
    if problem.text("x") not in ("fp16", "bf16"):
        return f"takes fp16 or bf16 activations, not {problem.text('x')}"
    if problem["act_order"]:
        return "takes no act-order"
    if k % 16 or n % 8:
        return f"copies rows of whole 16 bytes: needs K a multiple of 16 and N of 8, got N={n}, K={k}"
    if "silu_mul" in problem.flags("epilogue") and n % 16:
        return f"stores rows of whole 16 bytes: needs y's columns in multiples of 8, got {n // 2}"
    return None


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Every tile, best first by an estimate."""
    blocks = problem.text("w").startswith("fp8_block")
    return configs(BLOCKS if blocks else WHOLE, problem, target, blocks=blocks)


def config(problem: Problem, target: Target) -> Config:
    """The first of `space`."""
    return next(iter(space(problem, target)))


def workspace(problem: Problem, config: Config) -> Workspace:
    """Quantized rows of x."""
    m, k = problem.integers(*"mk")
    return Workspace(room_of(bool(config["blocks"]), m, k, bool(problem["codes"])).size)


def aot(target: Target) -> list[CuteDslCase]:
    """With scales of blocks, and of rows: the largest tile without an epilogue, smaller ones with all of it."""
    everything = "bias+residual+silu_mul"
    cases = {
        "fp8_block_256": (BLOCKS[0], "none", True),
        "fp8_block_128_bias_residual_silu_mul": (BLOCKS[1], everything, True),
        "fp8_block_64_bias": (BLOCKS[2], "bias", True),
        "fp8_ch_256": (WHOLE[0], "none", False),
        "fp8_ch_64_bias_residual_silu_mul": (WHOLE[2], everything, False),
    }
    build = "gristmill.kernels.linear.cutedsl_sm100._fp8:fp8_product"
    rest: dict[str, ConfigValue] = {"x": "bf16", "arch": target.nvcc_arch or "sm_100a"}
    return [
        CuteDslCase(
            name,
            build,
            {**tile._asdict(), "epilogue": epilogue, "blocks": blocks, **rest},
            ("tcgen05", "tma"),
        )
        for name, (tile, epilogue, blocks) in cases.items()
    ]


KERNEL = Kernel(
    op="linear",
    name="linear_fp8_cutedsl_sm100",
    provider="gristmill",
    language="cutedsl",
    target=f"{__name__}:launch",
    aot=f"{__name__}:aot",
    requires=requirement("compute_89"),
    summary="x quantized in a launch of its own; persistent warp-specialized tcgen05, sums of blocks of 128 columns added up in registers",
    accepts=accepts,
    supports=("codes",),
    config=config,
    space=space,
    workspace=workspace,
    layouts=("plain_v1",),
    examples=(
        "m=0,n=64,k=128,w=fp8_ch.fp8_token",
        "m=7,n=256,k=2880,w=fp8_block.fp8_g128,epilogue=bias",
        "m=257,n=136,k=272,x=fp16,w=fp8_ch.fp8_token,epilogue=bias+residual",
        "m=300,n=512,k=640,w=fp8_block.fp8_g128,epilogue=silu_mul",
        "m=1,n=4096,k=1024,w=fp8.fp8_token,epilogue=bias+residual+silu_mul",
        "m=129,n=64,k=128,w=fp8.fp8_token,codes=true",
        "m=33,n=200,k=656,w=fp8_block.fp8_g128,codes=true",
        "m=2048,n=4096,k=400,w=fp8_block.fp8_g128,epilogue=residual",
    ),
    priority=105,
)
