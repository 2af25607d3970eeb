"""FP8 weights with FP8 activations in CuTe DSL for Hopper (`_cutedsl_fp8_sm90.py`), a product with two-level sums, compiled on the user's machine.

x is quantized by the launch that `linear_w8a8_sm90` has. Weights stay as checkpoints have them, in plain_v1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, ConfigValue, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import BLOCK, QuantScheme, cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.cutedsl import PACKAGES, CuteDslCase, program
from gristmill.kernels.linear.w8a8_sm90.shapes import operands_of, workspace_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from gristmill.kernels.calls import LinearCall

SCHEMES = ("fp8.fp8_token", "fp8_ch.fp8_token", "fp8_block.fp8_g128")
TILE: dict[str, ConfigValue] = {"bm": 128, "bn": 128, "slots": 6}
"""Rows of x and of W of a tile: the registers of two warpgroups hold the sums of a slot and of all; and slots."""
PROCESSORS = 132
"""Multiprocessors of a target that does not say how many it has."""


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K] fp16 or bf16, the six tensors of plain_v1 -> out [..., N or N / 2]. Compiles at first use.

    Raises:
        ValueError: a permutation of columns, or no block row for each row of W.
    """
    import torch

    from gristmill.kernels.common import need
    from gristmill.kernels.linear._cutedsl_fp8_sm90 import fp8_product
    from gristmill.kernels.linear._epilogue import finish

    codes, w_scales, _, _, row_block, perm = call.weight
    k, rows = call.x.shape[-1], codes.shape[0]
    m = call.x.numel() // k
    expected = rows if config["blocks"] else 0
    need(
        row_block.numel() == expected and not perm.numel(),
        f"linear_fp8_cutedsl_sm90: takes columns in order and {expected} block rows, got {row_block.numel()}"
        + (" and a permutation" if perm.numel() else ""),
    )
    if m == 0:
        return
    values, x_scales = _quantized(config, call, m, k)
    plain = call.bias is None and call.residual is None and not call.silu_mul
    z = call.out.view(m, rows) if plain else torch.empty(m, rows, dtype=call.x.dtype, device=call.x.device)
    of_w = w_scales.float() if config["blocks"] else w_scales.float().view(-1, 1).expand(rows, 1)
    of_rows = row_block if config["blocks"] else of_w
    program(fp8_product, config)(values, codes, x_scales, of_w, of_rows, z, config["ctas"])
    if not plain:
        finish(z.view(*call.x.shape[:-1], rows), call.bias, call.residual, call.silu_mul, call.out)


def _quantized(config: Config, call: LinearCall, m: int, k: int) -> tuple[Tensor, Tensor]:
    """Codes [M, K] as uint8, and scales [M, groups], the scales of a group in order."""
    import torch

    from gristmill.kernels.common import need_workspace
    from gristmill.kernels.linear.w8a8_sm90._launch import pitched, quantize_rows

    operands = operands_of("fp8_block" if config["blocks"] else "fp8")
    if call.codes is not None and call.scales is not None:
        return call.codes.reshape(m, k).contiguous().view(torch.uint8), pitched(operands, call.scales)
    size = workspace_bytes(operands, m, k)
    space = call.workspace
    if space is None:
        space = torch.empty(size, dtype=torch.uint8, device=call.x.device)
    else:
        need_workspace("linear", space, size, call.x.device)
    device = call.x.get_device()
    stream = torch.cuda.current_stream(device).cuda_stream
    quantized = quantize_rows(operands, call.x, m, k, space, device, stream)
    begin, groups = quantized.scales - quantized.codes, cdiv(k, BLOCK) if operands.blocks else 1
    scales = space[begin : begin + 4 * groups * quantized.pitch].view(torch.float32)
    return space[: m * k].view(m, k), scales.view(groups, quantized.pitch).T[:m]


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
    return None


def config(problem: Problem, target: Target) -> Config:
    """One CTA per multiprocessor."""
    return {
        **TILE,
        "ctas": target.multiprocessors or PROCESSORS,
        "x": problem.text("x"),
        "blocks": problem.text("w").startswith("fp8_block"),
        "arch": target.nvcc_arch or "sm_90a",
    }


def workspace(problem: Problem, config: Config) -> Workspace:
    """Quantized rows of x."""
    operands = operands_of("fp8_block" if config["blocks"] else "fp8")
    m, k = problem.integers("m", "k")
    return Workspace(workspace_bytes(operands, m, k, given=bool(problem["codes"])))


def aot(target: Target) -> list[CuteDslCase]:
    """With scales of blocks, and of rows."""
    fixed: dict[str, ConfigValue] = {"ctas": PROCESSORS, "x": "bf16", "arch": target.nvcc_arch or "sm_90a"}
    build = "gristmill.kernels.linear._cutedsl_fp8_sm90:fp8_product"
    return [
        CuteDslCase(name, build, {**TILE, **fixed, "blocks": name == "fp8_block"}, ("wgmma", "tma"))
        for name in ("fp8_block", "fp8_ch")
    ]


KERNEL = Kernel(
    op="linear",
    name="linear_fp8_cutedsl_sm90",
    provider="gristmill",
    language="cutedsl",
    target=f"{__name__}:launch",
    aot=f"{__name__}:aot",
    requires=Requirement(
        features=(frozenset({"wgmma", "tma"}),),
        vendors=("nvidia",),
        packages=PACKAGES,
        code="cutedsl:sm_90a",
        loads=("sm_90a",),  # the quantizer
    ),
    summary="x quantized in a launch of its own; persistent warp-specialized wgmma, sums of 128 columns added up in registers",
    accepts=accepts,
    supports=("codes",),
    config=config,
    workspace=workspace,
    layouts=("plain_v1",),
    examples=(
        "m=7,n=256,k=2880,w=fp8_block.fp8_g128,epilogue=bias",
        "m=257,n=136,k=272,x=fp16,w=fp8_ch.fp8_token,epilogue=bias+residual",
        "m=300,n=512,k=640,w=fp8_block.fp8_g128,epilogue=silu_mul",
        "m=129,n=64,k=128,w=fp8.fp8_token,codes=true",
        "m=33,n=200,k=656,w=fp8_block.fp8_g128,codes=true",
    ),
    priority=90,
)
