"""Residual addition and RMSNorm in one pass: residual += x in place, then y = RMSNorm(residual) · weight.

This is what a pre-norm decoder layer does between its blocks: the residual stream is stored in the model's dtype, and
the norm reads what was stored. So the sum is rounded to the dtype once, and normalised from the rounded value.
"""

from __future__ import annotations

from typing import Any

from gristmill.kernel_registry.op import Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem
from gristmill.kernels.common import FLOATS, ITEM_BYTES, dtype_name, need, need_rows, rows_of, torch_dtype


def reference(x: Any, residual: Any, weight: Any, eps: float) -> Any:
    """x [..., N], residual [..., N] (becomes x + residual, rounded to its dtype), weight [N] -> normed [..., N].

    The norm is computed in float32 from the stored sum and rounded once. The output may be x itself.
    """
    residual.copy_(x.float() + residual.float())
    wide = residual.float()
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * weight.float()).to(x.dtype)


def describe(x: Any, residual: Any, weight: Any, eps: float) -> dict[str, Any]:
    """Axis values of a call; ValueError or TypeError for arguments that do not fit."""
    name = "fused_add_rms_norm"
    rows = rows_of(f"{name}: x", x)
    need(x.shape[-1] > 0, f"{name}: the last dimension of x is empty: {tuple(x.shape)}")
    need(
        residual.shape == x.shape,
        f"{name}: residual must have x's shape {tuple(x.shape)}, got {tuple(residual.shape)}",
    )
    need_rows(name, {}, {"residual": residual})
    need(
        weight.dim() == 1 and weight.shape[0] == x.shape[-1],
        f"{name}: weight must be [{x.shape[-1]}] for x {tuple(x.shape)}, got {tuple(weight.shape)}",
    )
    need(weight.stride(0) == 1 or weight.shape[0] == 1, f"{name}: weight must be contiguous")
    for other, tensor in (("residual", residual), ("weight", weight)):
        if tensor.dtype != x.dtype:
            raise TypeError(f"{name}: {other} must have x's dtype {x.dtype}, got {tensor.dtype}")
        need(tensor.device == x.device, f"{name}: {other} is on {tensor.device}, x on {x.device}")
    need(eps >= 0, f"{name}: eps must not be negative, got {eps}")
    return {"m": rows, "n": x.shape[-1], "x": dtype_name(x.dtype)}


def guard(problem: Problem, x: Any, residual: Any, weight: Any, eps: float, out: Any) -> int:
    """Rows of a planned call; ValueError if it is not one of `problem`."""
    shape, kind, n = x.shape, x.dtype, problem.values[1][1]
    if (
        shape[-1] != n
        or residual.shape != shape
        or out.shape != shape
        or weight.shape != (n,)
        or residual.dtype != kind
        or out.dtype != kind
        or weight.dtype != kind
        or dtype_name(kind) != problem.values[2][1]
    ):
        raise ValueError(
            f"fused_add_rms_norm planned for {problem}: got x {tuple(shape)} {kind}, residual "
            f"{tuple(residual.shape)} {residual.dtype}, weight {tuple(weight.shape)} {weight.dtype}, "
            f"out {tuple(out.shape)} {out.dtype}"
        )
    if not (
        x.is_contiguous() and residual.is_contiguous() and out.is_contiguous() and weight.is_contiguous()
    ):
        need_rows("fused_add_rms_norm", {"x": x}, {"residual": residual, "out": out})
        need(weight.is_contiguous(), "fused_add_rms_norm: weight must be contiguous")
    return x.numel() // n


def like(x: Any, residual: Any, weight: Any, eps: float) -> tuple[tuple[Any, Any], ...]:
    """Shape and dtype of the output."""
    return ((x.shape, x.dtype),)


def inputs(problem: Problem, seed: int, device: str) -> list[Any]:
    """Random arguments: rows of very different sizes, so that a wrong row or a wrong mean shows."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    m, n, dtype = problem.integer("m"), problem.integer("n"), torch_dtype(problem.text("x"))
    x, residual = (
        torch.randn(m, n, generator=generator) * torch.exp(torch.randn(m, 1, generator=generator))
        for _ in range(2)
    )
    weight = 1 + 0.2 * torch.randn(n, generator=generator)
    return [*(t.to(dtype).to(device) for t in (x, residual, weight)), 1e-5]


def cost(problem: Problem) -> Cost:
    """x and the residual read once, the residual and the output written once, the weight read once."""
    m, n, item = problem.integer("m"), problem.integer("n"), ITEM_BYTES[problem.text("x")]
    return Cost(bytes=(4 * m * n + n) * item, flops=5 * m * n, unit="fp32")


def tolerance(problem: Problem) -> Tolerance:
    """One rounding step of the dtype beside the reference's own, for the sum and for the norm."""
    return Tolerance("relative", {"fp32": 4e-6, "fp16": 1.1e-3, "bf16": 8.5e-3}[problem.text("x")])


OP = Op(
    name="fused_add_rms_norm",
    family="norm",
    summary="residual += x in place, then RMSNorm of the stored sum",
    axes=(
        Axis("m", "int", "rows (tokens)", dynamic=True),
        Axis("n", "int", "row length (hidden size)", minimum=1),
        Axis("x", "dtype", "dtype of x, residual, weight and the output", default="bf16", choices=FLOATS),
    ),
    arguments="Tensor x, Tensor(a!) residual, Tensor weight, float eps",
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
