"""fp8 weights per row with fp8 activations per token by AITER (AMD, MIT); the module is probed for the function.

No extra of gristmill installs it: `aiter` on PyPI is an unrelated project, so only a module with ``gemm_a8w8`` is used. CDNA3 multiplies e4m3fnuz:
the same bits have half the value there, so bytes are reinterpreted, -0 (NaN in fnuz) becomes 0, and both scales are doubled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target

if TYPE_CHECKING:
    from torch import Tensor

    from gristmill.kernels.calls import LinearCall

SCHEMES = ("fp8_ch.fp8_token", "fp8.fp8_token")


def as_fnuz(values: Tensor) -> Tensor:
    """e4m3fn values [...] -> e4m3fnuz of half the value, with the same bits except for -0."""
    import torch

    from gristmill.quant.numeric import e4m3fn_to_fnuz

    return e4m3fn_to_fnuz(values.view(torch.uint8)).view(torch.float8_e4m3fnuz)


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K] bf16 or float16, the six tensors of plain_v1 in fp8_ch or fp8 -> out [..., N or N / 2]."""
    import aiter
    import torch

    from gristmill.kernels.linear._epilogue import finish
    from gristmill.quant.activations import quantize_activation

    codes, scales = call.weight[0].view(torch.float8_e4m3fn), call.weight[1]
    act = quantize_activation(call.x.reshape(-1, call.x.shape[-1]), "fp8_token")
    values, x_scales, w_scales = act.values, act.scales, scales.float().view(1, -1)
    if config["fnuz"]:
        values, codes, x_scales, w_scales = as_fnuz(values), as_fnuz(codes), 2 * x_scales, 2 * w_scales
    z = aiter.gemm_a8w8(values, codes, x_scales, w_scales, dtype=call.x.dtype)
    finish(z.view(*call.x.shape[:-1], codes.shape[0]), call.bias, call.residual, call.silu_mul, call.out)


def accepts(problem: Problem) -> str | None:
    """fp8 weights per row or tensor, activations per token, half precision out."""
    if problem.text("w") not in SCHEMES:
        return f"multiplies {' and '.join(SCHEMES)}, not {problem.text('w')}"
    if problem.text("x") == "fp32":
        return "writes bf16 or float16, not fp32"
    n, k = problem.integer("n"), problem.integer("k")
    return None if k % 16 == 0 and n % 16 == 0 else f"needs K and N multiples of 16, got N={n}, K={k}"


def config(problem: Problem, target: Target) -> Config:
    """Which e4m3 the device multiplies."""
    return {"fnuz": "fp8.fnuz" in target.features}


KERNEL = Kernel(
    op="linear",
    name="linear_aiter",
    provider="aiter",
    language="hip",
    target=f"{__name__}:launch",
    requires=Requirement.any(
        {"mfma.fp8"},
        vendors=("amd",),
        offers=("aiter:gemm_a8w8",),
        origin="https://github.com/ROCm/aiter (not PyPI's aiter)",
    ),
    summary="AITER gemm_a8w8",
    accepts=accepts,
    config=config,
    layouts=("plain_v1",),
    examples=("m=7,n=48,k=256,w=fp8_ch.fp8_token",),
    auto=False,
    priority=60,
    proven="",
)
