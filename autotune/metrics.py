"""The error of outputs against the reference: one metric per operation, limited by its tolerance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from gristmill.autotune.guard import same_bits
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem


def error_of(
    op: Op, problem: Problem, arguments: Sequence[Any], outputs: Sequence[Any], references: Sequence[Any]
) -> float:
    """The error figure of `outputs` against `references`, infinite when shapes, dtypes or NaNs do not agree."""
    for out, ref in zip(outputs, references, strict=True):
        if out.shape != ref.shape or out.dtype != ref.dtype:
            return math.inf
        if out.is_floating_point() and not torch.equal(out.float().isnan(), ref.float().isnan()):
            return math.inf
    if op.error is not None:
        return float(op.error(problem, arguments, outputs, references))
    metric = op.tolerance(problem).metric
    if metric not in METRICS:
        raise ValueError(f"operation {op.name}: unknown metric {metric!r}; known: {', '.join(METRICS)}")
    return max((METRICS[metric](out, ref) for out, ref in zip(outputs, references, strict=True)), default=0.0)


def relative(out: torch.Tensor, ref: torch.Tensor) -> float:
    """Largest |Δ| / max(|ref|, 1e-3 · RMS(ref)): relative where values have size, absolute near zero."""
    if out.numel() == 0:
        return 0.0
    out64, ref64 = out.double(), ref.double()
    same = out64 == ref64
    delta = torch.where(same, torch.zeros_like(ref64), (out64 - ref64).abs())
    finite = ref64[ref64.isfinite()]
    floor = 1e-3 * float(finite.square().mean().sqrt()) if finite.numel() else 0.0
    return _worst(delta / ref64.abs().clamp_min(max(floor, 1e-30)))


def scaled(out: torch.Tensor, ref: torch.Tensor) -> float:
    """Largest |Δ| / RMS of the reference's row: for sums whose terms cancel (matrix products, attention)."""
    if out.numel() == 0:
        return 0.0
    out64, ref64 = out.double(), ref.double()
    rms = ref64.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30)
    return _worst(torch.where(out64 == ref64, 0.0, (out64 - ref64).abs() / rms))


def exact(out: torch.Tensor, ref: torch.Tensor) -> float:
    """0 when every element is equal (NaN equals NaN), else 1."""
    return 0.0 if same_bits(out, ref) else 1.0


def _worst(values: torch.Tensor) -> float:
    worst = float(values.max())
    return math.inf if math.isnan(worst) else worst


METRICS = {"relative": relative, "scaled": scaled, "exact": exact}
