"""Weight-only linear by humming (humming-kernels, Apache-2.0): CUDA kernels compiled at run time, over humming_v1."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearCall

LOCKS = Workspace(8192, zeroed=True)
"""Locks of the CTAs that share a tile; humming leaves them zero."""
SCHEMES = (
    *(f"int4_g{group}{zero}" for zero in ("", "_zp") for group in (32, 64, 128)),
    "mxfp4",
    "nvfp4",
    "fp8",
    "fp8_block",
)
"""The schemes of humming_v1."""


@lru_cache(maxsize=4096)
def _text(raw: bytes) -> str:
    return raw.decode()


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K] bf16, the five tensors of humming_v1 -> out [..., N or N / 2]."""
    import torch
    from humming.ops import humming_gemm

    from gristmill.kernels.linear._epilogue import finish

    tensors = [t if t.numel() else None for t in call.weight[:4]]
    flat = call.x.reshape(-1, call.x.shape[-1])
    rows = call.out.shape[-1] * (2 if call.silu_mul else 1)
    plain = call.bias is None and call.residual is None and not call.silu_mul
    target = (
        call.out.view(-1, rows)
        if plain
        else torch.empty(flat.shape[0], rows, dtype=call.x.dtype, device=call.x.device)
    )
    locks = (
        torch.zeros(LOCKS.bytes, dtype=torch.uint8, device=call.x.device)
        if call.workspace is None
        else call.workspace[: LOCKS.bytes]
    )
    humming_gemm(
        layer_config=_text(call.weight[4].numpy().tobytes()),
        inputs=flat,
        weight=tensors[0],
        weight_scale=tensors[1],
        zero_point=tensors[2],
        weight_scale_2=tensors[3],
        outputs=target,
        locks=locks.view(torch.int32),
    )
    if not plain:
        finish(target.view(*call.x.shape[:-1], rows), call.bias, call.residual, call.silu_mul, call.out)


def accepts(problem: Problem) -> str | None:
    """bf16 activations, weight-only schemes that humming holds exactly, and N and K that its tiles divide."""
    scheme = QuantScheme.parse(problem.text("w"))
    if scheme.name not in SCHEMES:
        return f"holds {', '.join(SCHEMES)}, not {scheme}"
    if problem.text("x") != "bf16":
        return f"wrapped for bf16 activations, not {problem.text('x')}"
    if problem["act_order"]:
        return "takes no act-order"
    n, k = problem.integer("n"), problem.integer("k")
    step = max(128, scheme.group_size or 0)
    return f"needs N a multiple of 128 and K of {step}, got N={n}, K={k}" if n % 128 or k % step else None


KERNEL = Kernel(
    op="linear",
    name="linear_humming",
    provider="humming",
    language="cuda",
    target=f"{__name__}:launch",
    requires=Requirement.any(
        {"mma.bf16"},
        vendors=("nvidia",),
        packages=(("humming-kernels", "0.1.19"),),
        offers=("humming.ops:humming_gemm", "humming.layer:HummingLayer"),
    ),
    summary="humming's run-time compiled GEMM for quantized weights",
    accepts=accepts,
    workspace=lambda problem, config: LOCKS,
    layouts=("humming_v1",),
    examples=(
        "m=5,n=256,k=512,w=int4_g128",
        "m=33,n=128,k=256,w=int4_g64_zp",
        "m=64,n=384,k=256,w=fp8",
        "m=17,n=256,k=384,w=fp8_block,epilogue=bias",
        "m=9,n=128,k=256,w=mxfp4,epilogue=bias+silu_mul",
        "m=257,n=256,k=256,w=nvfp4,epilogue=residual",
    ),
    deterministic=False,
    priority=60,
    proven="",
)
