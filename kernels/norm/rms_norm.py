"""RMSNorm: y = x / sqrt(mean(x²) + eps) · weight over the last dimension (Zhang and Sennrich, 2019)."""

from __future__ import annotations

from typing import Any

from gristmill.kernel_registry.op import Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem
from gristmill.kernels.common import FLOATS, ITEM_BYTES, dtype_name, need, need_rows, rows_of, torch_dtype


def reference(x: Any, weight: Any, eps: float) -> Any:
    """x [..., N], weight [N] -> [..., N] in x's dtype; computed in float32 and rounded once."""
    wide = x.float()
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * weight.float()).to(x.dtype)


def describe(x: Any, weight: Any, eps: float) -> dict[str, Any]:
    """Axis values of a call; ValueError or TypeError for arguments that do not fit."""
    rows = rows_of("rms_norm: x", x)
    need(x.shape[-1] > 0, f"rms_norm: the last dimension of x is empty: {tuple(x.shape)}")
    need(
        weight.dim() == 1 and weight.shape[0] == x.shape[-1],
        f"rms_norm: weight must be [{x.shape[-1]}] for x {tuple(x.shape)}, got {tuple(weight.shape)}",
    )
    if weight.dtype != x.dtype:
        raise TypeError(f"rms_norm: weight must have x's dtype {x.dtype}, got {weight.dtype}")
    need(weight.device == x.device, f"rms_norm: weight is on {weight.device}, x on {x.device}")
    need(weight.stride(0) == 1 or weight.shape[0] == 1, "rms_norm: weight must be contiguous")
    need(eps >= 0, f"rms_norm: eps must not be negative, got {eps}")
    return {"m": rows, "n": x.shape[-1], "x": dtype_name(x.dtype)}


def guard(problem: Problem, x: Any, weight: Any, eps: float, out: Any) -> int:
    """Rows of a planned call; ValueError if it is not one of `problem`."""
    shape, kind, n = x.shape, x.dtype, problem.values[1][1]
    if (
        shape[-1] != n
        or out.shape != shape
        or weight.shape != (n,)
        or out.dtype != kind
        or weight.dtype != kind
        or dtype_name(kind) != problem.values[2][1]
    ):
        raise ValueError(
            f"rms_norm planned for {problem}: got x {tuple(shape)} {kind}, weight {tuple(weight.shape)} "
            f"{weight.dtype}, out {tuple(out.shape)} {out.dtype}"
        )
    if not (x.is_contiguous() and out.is_contiguous() and weight.is_contiguous()):
        need_rows("rms_norm", {"x": x}, {"out": out})
        need(weight.is_contiguous(), "rms_norm: weight must be contiguous")
    return x.numel() // n


def like(x: Any, weight: Any, eps: float) -> tuple[tuple[Any, Any], ...]:
    """Shape and dtype of the output."""
    return ((x.shape, x.dtype),)


def inputs(problem: Problem, seed: int, device: str) -> list[Any]:
    """Random arguments: rows of very different sizes, so that a wrong row or a wrong mean shows."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    m, n, dtype = problem.integer("m"), problem.integer("n"), torch_dtype(problem.text("x"))
    x = torch.randn(m, n, generator=generator) * torch.exp(torch.randn(m, 1, generator=generator))
    weight = 1 + 0.2 * torch.randn(n, generator=generator)
    return [x.to(dtype).to(device), weight.to(dtype).to(device), 1e-5]


def cost(problem: Problem) -> Cost:
    """x read once, y written once, the weight read once."""
    m, n, item = problem.integer("m"), problem.integer("n"), ITEM_BYTES[problem.text("x")]
    return Cost(bytes=(2 * m * n + n) * item, flops=4 * m * n, unit="fp32")


def tolerance(problem: Problem) -> Tolerance:
    """One rounding step of the output dtype beside the reference's own."""
    return Tolerance("relative", {"fp32": 4e-6, "fp16": 1.1e-3, "bf16": 8.5e-3}[problem.text("x")])


OP = Op(
    name="rms_norm",
    family="norm",
    summary="RMSNorm over the last dimension",
    axes=(
        Axis("m", "int", "rows (tokens)", dynamic=True),
        Axis("n", "int", "row length (hidden size)", minimum=1),
        Axis("x", "dtype", "dtype of x, weight and the output", default="bf16", choices=FLOATS),
    ),
    arguments="Tensor x, Tensor weight, float eps",
    outputs=("out",),
    reference=reference,
    describe=describe,
    guard=guard,
    like=like,
    inputs=inputs,
    cost=cost,
    tolerance=tolerance,
    bucket="m",
    examples=(
        "m=0,n=64,x=fp32",
        "m=1,n=1,x=fp32",
        "m=7,n=257,x=bf16",
        "m=33,n=768,x=fp16",
        "m=5,n=4096,x=bf16",
        "m=257,n=256,x=fp32",
        "m=2,n=16387,x=bf16",
    ),
    bench=("m=1,n=4096", "m=64,n=7168", "m=1024,n=7168", "m=16384,n=7168"),
)
