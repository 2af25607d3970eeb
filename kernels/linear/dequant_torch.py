"""Quantized linear in torch alone: chunks of weight rows are dequantized and multiplied. Runs anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearCall

CHUNK = 1 << 22
"""Weights dequantized at a time: 16 MB of float32."""


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K], a weight packed as plain_v1, cpu_rows16_v1 or cpu_groups16_v1 -> out [..., N or N / 2].

    For bf16 activations the weight is rounded to bf16; float16 and float32 activations are multiplied in float32.
    """
    import torch

    from gristmill.kernels._packed_rows import dequantize_rows, gather, perm_of
    from gristmill.kernels.given_codes import activations
    from gristmill.kernels.linear._epilogue import finish_in_torch

    scheme = QuantScheme.parse(str(config["scheme"]))
    k, rows = call.x.shape[-1], call.out.shape[-1] * (2 if call.silu_mul else 1)
    flat = call.x.reshape(-1, k)
    if scheme.activation is not None:
        flat = activations(call.x, scheme.activation, call.codes, call.scales).reshape(-1, k)
    elif call.x.dtype != torch.bfloat16:
        flat = flat.float()
    flat = gather(flat, perm_of(call.weight))
    z = torch.empty(flat.shape[0], rows, dtype=flat.dtype, device=call.x.device)
    step = max(16, CHUNK // k // 16 * 16)
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        part = dequantize_rows(call.weight, scheme, k, start, stop).to(flat.dtype)
        z[:, start:stop] = flat @ part.T
    finish_in_torch(
        z,
        call.bias,
        None if call.residual is None else call.residual.view(-1, call.out.shape[-1]),
        call.silu_mul,
        call.out.view(-1, call.out.shape[-1]),
    )


def accepts(problem: Problem) -> str | None:
    """Quantized weights, with any activation format."""
    scheme = QuantScheme.parse(problem.text("w"))
    return "multiplies quantized weights, not dense ones" if scheme.is_dense else None


def config(problem: Problem, target: Target) -> Config:
    """The scheme, which cannot be derived from packed tensors."""
    return {"scheme": problem.text("w")}


KERNEL = Kernel(
    op="linear",
    name="linear_dequant_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="dequantize rows, then torch's product",
    accepts=accepts,
    config=config,
    supports=("codes",),
    layouts=("plain_v1", "cpu_rows16_v1", "cpu_groups16_v1"),
    dequantizes=True,
)
