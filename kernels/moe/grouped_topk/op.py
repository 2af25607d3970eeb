"""Grouped top-k: the experts of each token and their weights (DeepSeek-V3, arXiv 2412.19437, 2.1.2).

Plain softmax top-k (Mixtral, Qwen3-MoE) is the same with one group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.arguments import ROWS, Scalar, Tensor
from gristmill.kernel_registry.op import Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem, problems
from gristmill.kernels.common import FLOATS, ITEM_BYTES
from gristmill.kernels.random_inputs import Draw

if TYPE_CHECKING:
    import torch

MOST_EXPERTS = 4096
SCORINGS = ("sigmoid", "softmax")
NEAR_TIE = 1e-6
"""Selection scores closer than this (relative to score + |bias|), but not equal, may be ordered either way."""


def reference(
    logits: torch.Tensor,
    top_k: int,
    bias: torch.Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    scoring: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [..., E], bias float32 [E] or None -> weights float32 [..., top_k], ids int32 [..., top_k].

    score = sigmoid(logit), or softmax over all E, in float32. choice = score + bias. A group (E / n_group neighbours)
    counts as the sum of its two best choices, or its best one without bias; the best topk_group groups are kept, and
    the best top_k experts among them are chosen. weight = score (without bias), divided by their sum + 1e-20 when
    renormalize, times scale.

    Order: descending choice; equal choices (and equal groups) go to the lower index. A NaN choice ranks as -inf, so ids are
    always top_k different experts of the kept groups; its weight stays NaN.
    """
    import torch

    scores = logits.float().sigmoid() if scoring == "sigmoid" else logits.float().softmax(-1)
    weights, ids = choose(scores, top_k, bias, n_group, topk_group)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, ids.to(torch.int32)


def choose(
    scores: torch.Tensor, top_k: int, bias: torch.Tensor | None, n_group: int, topk_group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores and int64 ids of the experts that float32 scores [..., E] choose."""
    choice = scores if bias is None else scores + bias
    keys = _keys(choice)
    if topk_group < n_group:
        grouped = _nan_last(choice).unflatten(-1, (n_group, -1))
        best = grouped.topk(1 if bias is None else min(2, grouped.shape[-1]), -1).values.sum(-1)
        kept_groups = _keys(best).topk(topk_group, -1).indices
        inside = keys.new_zeros(best.shape).scatter_(-1, kept_groups, 1).bool()
        keys = keys.unflatten(-1, (n_group, -1)).masked_fill(~inside[..., None], -1).flatten(-2)
    ids = keys.topk(top_k, -1).indices
    return scores.gather(-1, ids), ids


def _nan_last(values: torch.Tensor) -> torch.Tensor:
    """NaN as -inf."""
    return values.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)


def _keys(values: torch.Tensor) -> torch.Tensor:
    """Distinct non-negative int64 keys in the order of float32 values [..., N]; the lower index is the larger of equals."""
    import torch

    values = torch.where(values == 0, 0.0, _nan_last(values))
    bits = values.view(torch.int32).long()
    ordered = torch.where(bits < 0, -1 - (bits & 0x7FFFFFFF), bits) + (1 << 31)
    n = values.shape[-1]
    return ordered * MOST_EXPERTS + torch.arange(n - 1, -1, -1, device=values.device)


def misfit(experts: int, top_k: int, n_group: int, topk_group: int) -> str | None:
    """Why these numbers are inconsistent; None if they are not."""
    if not 1 <= experts <= MOST_EXPERTS:
        return f"1 to {MOST_EXPERTS} experts, got {experts}"
    if n_group < 1 or experts % n_group:
        return f"n_group {n_group} does not divide {experts} experts"
    if not 1 <= topk_group <= n_group:
        return f"topk_group must be 1 to {n_group} (n_group), got {topk_group}"
    candidates = experts // n_group * topk_group
    return (
        None
        if 1 <= top_k <= candidates
        else f"top_k must be 1 to {candidates} (experts of the kept groups), got {top_k}"
    )


def check(problem: Problem) -> str | None:
    """Why the axes of `problem` are inconsistent; None if they are not."""
    return misfit(*problem.integers("e", "top_k", "n_group", "topk_group"))


def inputs(problem: Problem, seed: int, device: str) -> list[Any]:
    """Random logits, with ties; a bias large enough to change the choice."""
    import torch

    draw, (m, e) = Draw(problem, seed, device), problem.integers("m", "e")
    logits = 1.5 * draw.normal(m, e)
    logits = torch.where(draw.uniform(m, e) < 0.1, 1.25, logits)
    bias = None
    if problem["bias"]:
        spread = 0.1 if problem.text("scoring") == "sigmoid" else 0.5 / e
        bias = (spread * torch.randint(-3, 4, (e,), generator=draw.generator).float()).to(device)
    top_k, *groups = problem.integers("top_k", "n_group", "topk_group")
    (logits,) = draw.stored(logits)
    return [logits, top_k, bias, *groups, problem.text("scoring"), bool(problem["renormalize"]), 2.5]


def error(
    problem: Problem,
    arguments: Sequence[Any],
    outputs: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
) -> float:
    """Largest relative error of a weight, infinite when the ids of a row differ from the reference's.

    Ids of a row may differ if its decision depends on two choices that differ by less than `NEAR_TIE` in float64 but are not
    equal: float32 sigmoids differ in the last place. At most one row plus one percent of the rows may differ.
    """
    import torch

    weights, ids = outputs
    if ids.numel() == 0:
        return 0.0
    top_k = ids.shape[-1]
    differ = (ids != references[1]).reshape(-1, top_k).any(-1)
    excused = near_ties(*arguments[:6]).reshape(-1) if differ.any() else ~differ
    if (differ & ~excused).any() or int(differ.sum()) > 1 + differ.numel() // 100:
        return math.inf
    same = ~differ
    out, ref = (values.double().reshape(-1, top_k)[same] for values in (weights, references[0]))
    delta = torch.where((out == ref) | ref.isnan(), 0.0, (out - ref).abs() / ref.abs().clamp_min(1e-30))
    return float(delta.max()) if delta.numel() else 0.0


def near_ties(
    logits: torch.Tensor, top_k: int, bias: torch.Tensor | None, n_group: int, topk_group: int, scoring: str
) -> torch.Tensor:
    """Whether the decision of each row depends on a difference below `NEAR_TIE`, which float32 does not resolve: bool [...]."""
    import torch

    scores = logits.double().sigmoid() if scoring == "sigmoid" else logits.double().softmax(-1)
    offset = torch.zeros_like(scores[..., :1]) if bias is None else bias.double()
    choice, size = scores + offset, (scores + offset.abs()).expand_as(scores)
    close = torch.zeros(logits.shape[:-1], dtype=torch.bool, device=logits.device)

    def mark(values: torch.Tensor, sizes: torch.Tensor, cuts: slice) -> torch.Tensor:
        ordered, order = values.sort(-1, descending=True)
        # The next lower one, behind all that are equal.
        starts = ordered[..., 1:].masked_fill(ordered.diff() == 0, -math.inf)
        gap = (ordered[..., :-1] - starts.flip(-1).cummax(-1).values.flip(-1))[..., cuts]
        return ((gap > 0) & (gap < NEAR_TIE * sizes.gather(-1, order)[..., :-1][..., cuts])).any(-1)

    if topk_group < n_group:
        grouped = choice.unflatten(-1, (n_group, -1))
        top = grouped.topk(1 if bias is None else min(2, grouped.shape[-1]), -1)
        sizes = size.unflatten(-1, (n_group, -1)).gather(-1, top.indices).sum(-1)
        close |= mark(top.values.sum(-1), sizes, slice(topk_group - 1, topk_group))
        kept_groups = top.values.sum(-1).topk(topk_group, -1).indices
        inside = torch.zeros_like(top.values[..., 0]).scatter_(-1, kept_groups, 1).bool()
        choice = grouped.masked_fill(~inside[..., None], -math.inf).flatten(-2)
    return close | mark(choice, size, slice(0, top_k))


def cost(problem: Problem) -> Cost:
    """Logits and bias read once, weights and ids written once."""
    m, e, k = problem.integers("m", "e", "top_k")
    return Cost(
        bytes=m * e * ITEM_BYTES[problem.text("x")] + (4 * e if problem["bias"] else 0) + 8 * m * k,
        flops=m * e * (4 + k),
        unit="fp32",
    )


OP = Op(
    name="grouped_topk",
    family="moe",
    summary="expert choice: scores, groups, top-k, weights",
    axes=(
        Axis("m", "int", "tokens", dynamic=True),
        Axis("e", "int", "experts", minimum=1),
        Axis("top_k", "int", "experts per token", minimum=1),
        Axis("n_group", "int", "groups of experts", default=1, minimum=1),
        Axis("topk_group", "int", "groups kept", default=1, minimum=1),
        Axis("x", "dtype", "dtype of the logits", default="fp32", choices=FLOATS),
        Axis("scoring", "choice", "score of a logit", default="softmax", choices=SCORINGS),
        Axis("bias", "bool", "a bias for the choice alone", default=False),
        Axis("renormalize", "bool", "weights of a token sum to scale", default=True),
    ),
    arguments=(
        Tensor("logits", "... e", strides=ROWS),
        Scalar("top_k", "int", maximum="e"),
        Tensor("bias", "e", dtype="fp32", optional=True),
        Scalar("n_group", "int", 1),
        Scalar("topk_group", "int", 1),
        Scalar("scoring", "str", "softmax"),
        Scalar("renormalize", "bool", True),
        Scalar("scale", "float", 1.0, finite=True),
    ),
    returns=(Tensor("weights", "... top_k", dtype="fp32"), Tensor("ids", "... top_k", dtype="int32")),
    reference=reference,
    inputs=inputs,
    check=check,
    cost=cost,
    # ids exact; weights within some float32 rounding steps (a softmax and a sum).
    tolerance=lambda problem: Tolerance("relative", 4e-6),
    error=error,
    bucket="m",
    examples=problems(
        """
        m=0,e=16,top_k=2  m=1,e=16,top_k=2,n_group=8,topk_group=2,x=bf16,scoring=sigmoid,bias=true
        m=33,e=128,top_k=2,n_group=8,topk_group=2,scoring=sigmoid,bias=true
        m=64,e=256,top_k=8,n_group=8,topk_group=4,scoring=sigmoid,bias=true
        m=33,e=384,top_k=8,x=bf16,scoring=sigmoid,bias=true  m=5,e=512,top_k=22,scoring=sigmoid,bias=true
        m=7,e=60,top_k=4,renormalize=false
        m=9,e=160,top_k=6,n_group=8,topk_group=3,x=fp16,renormalize=false  m=17,e=8,top_k=2,x=bf16
        m=3,e=1,top_k=1  m=4,e=12,top_k=3,n_group=12,topk_group=5,bias=true
        """
    ),
    bench=problems(
        """
        m=1,e=256,top_k=8,n_group=8,topk_group=4,scoring=sigmoid,bias=true
        m=64,e=256,top_k=8,n_group=8,topk_group=4,scoring=sigmoid,bias=true
        m=4096,e=256,top_k=8,n_group=8,topk_group=4,scoring=sigmoid,bias=true  m=64,e=128,top_k=8,x=bf16
        """
    ),
)
