"""fp8 weights per row with fp8 activations per token by `torch._scaled_mm` (cuBLASLt or CUTLASS, as torch was built).

x is quantized by the launch that `linear_w8a8_sm90` has. Sums are float32 for every 128 columns (``use_fast_accum=False``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.linear.w8a8_sm90.shapes import operands_of, workspace_bytes

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearCall

OPERANDS = operands_of("fp8")


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K] bf16, the six tensors of plain_v1 in fp8_ch or fp8 -> out [..., N or N / 2]."""
    import torch

    from gristmill.kernels.common import need_workspace
    from gristmill.kernels.linear._epilogue import finish
    from gristmill.kernels.linear.w8a8_sm90._launch import quantize_rows

    workspace = call.workspace

    codes, scales, k = call.weight[0], call.weight[1], call.x.shape[-1]
    m, rows = call.x.numel() // k, codes.shape[0]
    if m == 0:
        return
    if call.codes is not None and call.scales is not None:
        values, x_scales = call.codes.reshape(m, k), call.scales.contiguous()
    else:
        size = workspace_bytes(OPERANDS, m, k)
        if workspace is None:
            workspace = torch.empty(size, dtype=torch.uint8, device=call.x.device)
        else:
            need_workspace("linear", workspace, size, call.x.device)
        device = call.x.get_device()
        quantized = quantize_rows(
            OPERANDS, call.x, m, k, workspace, device, torch.cuda.current_stream(device).cuda_stream
        )
        values = workspace[: m * k].view(m, k).view(torch.float8_e4m3fn)
        start = quantized.scales - quantized.codes
        x_scales = workspace[start : start + 4 * m].view(torch.float32).view(m, 1)
    plain = call.bias is None and call.residual is None and not call.silu_mul
    z = call.out.view(m, rows) if plain else torch.empty(m, rows, dtype=call.x.dtype, device=call.x.device)
    torch._scaled_mm(
        values,
        codes.view(torch.float8_e4m3fn).T,
        scale_a=x_scales,
        scale_b=scales.float().view(1, rows),
        out_dtype=call.x.dtype,
        out=z,
    )
    if not plain:
        finish(z.view(*call.x.shape[:-1], rows), call.bias, call.residual, call.silu_mul, call.out)


def accepts(problem: Problem) -> str | None:
    """fp8 weights per row or tensor, activations per token, bf16, N and K multiples of 16."""
    if problem.text("w") not in OPERANDS.schemes:
        return f"multiplies {' and '.join(OPERANDS.schemes)}, not {problem.text('w')}"
    if problem.text("x") != "bf16":
        return f"writes bf16, not {problem.text('x')}"
    n, k = problem.integer("n"), problem.integer("k")
    return None if k % 16 == 0 and n % 16 == 0 else f"needs K and N multiples of 16, got N={n}, K={k}"


def workspace(problem: Problem, config: Config) -> Workspace:
    """Quantized rows of x."""
    m, k = problem.integers("m", "k")
    return Workspace(workspace_bytes(OPERANDS, m, k, given=bool(problem["codes"])))


KERNEL = Kernel(
    op="linear",
    name="linear_scaled_mm_torch",
    provider="torch",
    language="cuda",
    target=f"{__name__}:launch",
    requires=Requirement(
        features=(frozenset({"wgmma", "tma"}),),
        vendors=("nvidia",),
        packages=(("torch", "2.11"),),
        code="cuda:sm_90a",
    ),
    summary="torch._scaled_mm after a launch that quantizes x",
    accepts=accepts,
    workspace=workspace,
    supports=("codes",),
    layouts=("plain_v1",),
    examples=(
        "m=7,n=48,k=256,w=fp8_ch.fp8_token",
        "m=7,n=48,k=256,w=fp8_ch.fp8_token,codes=true",
        "m=257,n=64,k=128,w=fp8.fp8_token,epilogue=bias+residual",
    ),
    priority=100,
    proven="sm_90: H200",
)
