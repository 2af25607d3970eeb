"""fp8_block weights with fp8 activations by DeepGEMM (DeepSeek, MIT); the module is probed for the function.

No extra of gristmill installs it: `deep-gemm` on PyPI has no ``fp8_gemm_nt``. Only a module with that function is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import cdiv

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearCall


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K] bf16, the six tensors of plain_v1 in fp8_block -> out [..., N or N / 2].

    x is quantized here, unless codes are given, per token and 128 columns; DeepGEMM rearranges the scales.
    """
    import deep_gemm
    import torch

    from gristmill.kernels.linear._epilogue import finish
    from gristmill.quant.activations import quantize_activation

    codes, scales, k = call.weight[0], call.weight[1], call.x.shape[-1]
    rows = codes.shape[0]
    if tuple(scales.shape) != (cdiv(rows, 128), cdiv(k, 128)):
        raise ValueError(
            f"linear_deepgemm: block scales must be whole 128 x 128 blocks of [{rows}, {k}], got "
            f"{tuple(scales.shape)}: fused or sharded inside a block"
        )
    if call.codes is not None and call.scales is not None:
        values, x_scales = call.codes.reshape(-1, k), call.scales.contiguous()
    else:
        act = quantize_activation(call.x.reshape(-1, k), "fp8_g128")
        values, x_scales = act.values, act.scales
    plain = call.bias is None and call.residual is None and not call.silu_mul
    z = (
        call.out.view(-1, rows)
        if plain
        else torch.empty(values.shape[0], rows, dtype=call.x.dtype, device=call.x.device)
    )
    deep_gemm.fp8_gemm_nt((values, x_scales), (codes.view(torch.float8_e4m3fn), scales), z)
    if not plain:
        finish(z.view(*call.x.shape[:-1], rows), call.bias, call.residual, call.silu_mul, call.out)


def accepts(problem: Problem) -> str | None:
    """DeepSeek's format, bf16 in and out, whole blocks along K."""
    if problem.text("w") != "fp8_block.fp8_g128":
        return f"multiplies fp8_block.fp8_g128, not {problem.text('w')}"
    if problem.text("x") != "bf16":
        return f"writes bf16, not {problem.text('x')}"
    n, k = problem.integer("n"), problem.integer("k")
    return (
        None if k % 128 == 0 and n % 64 == 0 else f"needs K a multiple of 128 and N of 64, got N={n}, K={k}"
    )


KERNEL = Kernel(
    op="linear",
    name="linear_deepgemm",
    provider="deepgemm",
    language="cuda",
    target=f"{__name__}:launch",
    requires=Requirement.any(
        {"wgmma", "tma"},
        {"tcgen05"},
        vendors=("nvidia",),
        offers=("deep_gemm:fp8_gemm_nt",),
        brings=("sm_90a", "sm_100f"),
        origin="https://github.com/deepseek-ai/DeepGEMM (not PyPI's deep-gemm)",
    ),
    summary="DeepGEMM fp8_gemm_nt",
    accepts=accepts,
    supports=("codes",),
    layouts=("plain_v1",),
    examples=("m=7,n=192,k=256,w=fp8_block.fp8_g128",),
    auto=False,
    priority=60,
    proven="",
)
