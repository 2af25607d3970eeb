"""Merging two partial attentions over disjoint keys by their log-sum-exps.

With weights eᵃ and eᵇ for natural log-sum-exps a and b: out = (eᵃ·A + eᵇ·B) / (eᵃ + eᵇ), lse = ln(eᵃ + eᵇ). This is
the online softmax of FlashAttention (Dao et al., 2022) as FlashInfer (Ye et al., 2025) states it for split keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.arguments import Tensor
from gristmill.kernel_registry.op import Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem, problems
from gristmill.kernels.common import FLOATS, ITEM_BYTES
from gristmill.kernels.random_inputs import Draw

if TYPE_CHECKING:
    import torch

NAME = "merge_attention_states"


def reference(
    a: torch.Tensor, a_lse: torch.Tensor, b: torch.Tensor, b_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """a, b [T, H, D]; a_lse, b_lse float32 [T, H], natural logarithms -> out [T, H, D] in a's dtype, lse float32 [T, H].

    A partial result with lse −inf covers no key and adds nothing, even if its values are NaN. If both are −inf, out is
    zero and lse −inf. float32 inside, rounded once.
    """
    import torch

    m_i = torch.maximum(a_lse, b_lse)
    m_i = torch.where(m_i == -math.inf, 0.0, m_i)
    weights = [torch.exp(lse - m_i) for lse in (a_lse, b_lse)]
    l_i = weights[0] + weights[1]
    terms = [
        torch.where((lse == -math.inf)[..., None], 0.0, part.float() * weight[..., None])
        for part, lse, weight in zip((a, b), (a_lse, b_lse), weights, strict=True)
    ]
    empty = l_i == 0
    out = (terms[0] + terms[1]) / torch.where(empty, 1.0, l_i)[..., None]
    return out.to(a.dtype), m_i + torch.log(l_i)


def inputs(problem: Problem, seed: int, device: str) -> list[Any]:
    """Random partials: close and far log-sum-exps, and rows in which one or both partials are empty and hold NaN."""
    import torch

    draw, (t, h, d) = Draw(problem, seed, device), problem.integers("t", "h", "d")
    a, b = draw.normal(t, h, d), draw.normal(t, h, d)
    a_lse = 5 * draw.normal(t, h)
    b_lse = a_lse + torch.where(draw.uniform(t, h) < 0.2, 40.0, 2.0) * draw.normal(t, h)
    kind = torch.randint(0, 8, (t, h), generator=draw.generator)
    for part, lse, kinds in ((a, a_lse, (0, 2)), (b, b_lse, (1, 2))):
        empty = (kind == kinds[0]) | (kind == kinds[1])
        lse[empty] = -math.inf
        part[empty] = math.nan
    a, b = draw.stored(a, b)
    return [a, a_lse.to(device), b, b_lse.to(device)]


def cost(problem: Problem) -> Cost:
    """Both partials read once, the output written once, and three log-sum-exps per row."""
    t, h, d = problem.integers("t", "h", "d")
    return Cost(bytes=t * h * (3 * d * ITEM_BYTES[problem.text("x")] + 12), flops=4 * t * h * d, unit="fp32")


LSE_LIMIT = 4e-6


def error(
    problem: Problem,
    arguments: Sequence[Any],
    outputs: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
) -> float:
    """Largest |Δ| of an output element / (weight·|a| + weight·|b|); |Δ| of lse / max(1, |lse|) counted in its own limit."""
    import torch

    a, a_lse, b, b_lse = (tensor.double() for tensor in arguments)
    if not a.numel():
        return 0.0
    lse, lse_out = references[1].double(), outputs[1].double()
    size = sum(
        torch.where(
            (part_lse == -math.inf)[..., None], 0.0, part.abs() * torch.exp(part_lse - lse)[..., None]
        )
        for part, part_lse in ((a, a_lse), (b, b_lse))
    )
    delta = (outputs[0].double() - references[0].double()).abs()
    worst = torch.where(delta == 0, 0.0, delta / (size + 1e-30)).max()
    gap = torch.where(lse_out == lse, 0.0, (lse_out - lse).abs() / lse.abs().clamp_min(1)).max()
    figure = max(float(worst), float(gap) / LSE_LIMIT * OP.tolerance(problem).limit)
    return math.inf if math.isnan(figure) else figure


OP = Op(
    name=NAME,
    family="attention",
    summary="two partial attentions into one, by log-sum-exp",
    axes=(
        Axis("t", "int", "tokens", dynamic=True),
        Axis("h", "int", "heads", minimum=1),
        Axis("d", "int", "elements of a head", minimum=1),
        Axis("x", "dtype", "dtype of the partials and the output", default="bf16", choices=FLOATS),
    ),
    arguments=(
        Tensor("a", "t h d"),
        Tensor("a_lse", "t h", dtype="fp32"),
        Tensor("b", "t h d"),
        Tensor("b_lse", "t h", dtype="fp32"),
    ),
    returns=(Tensor("out", "t h d"), Tensor("lse", "t h", dtype="fp32")),
    reference=reference,
    inputs=inputs,
    cost=cost,
    # One rounding step of the dtype, of the sum of the weighted magnitudes.
    tolerance=Tolerance.by_dtype("merge", fp32=4e-6, fp16=1.1e-3, bf16=8.5e-3),
    error=error,
    bucket="t",
    examples=problems(
        """
        t=0,h=2,d=8,x=fp32  t=1,h=1,d=1,x=fp32  t=7,h=3,d=33  t=33,h=5,d=64,x=fp16  t=17,h=8,d=128
        t=65,h=4,d=96,x=fp32
        """
    ),
    bench=("t=1,h=32,d=128", "t=64,h=32,d=128", "t=4096,h=32,d=128", "t=1024,h=128,d=512"),
)
