"""The choice of experts, with groups of experts and a bias as in DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gristmill.autotune.metrics import error_of
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem
from gristmill.kernels.random_inputs import Draw
from lab.peers.adapter import Arguments
from lab.peers.group import Group

SCALE = 2.5
"""Of the weights in DeepSeek-V3."""


def inputs(problem: Problem, device: str) -> Arguments:
    """Without ties, which libraries decide differently."""
    m, e, *sizes = problem.integers("m", "e", "top_k", "n_group", "topk_group")
    draw = Draw(problem, 0, device, source=device)
    bias = 0.1 * draw.normal(e) if problem["bias"] else None
    top_k, n_group, topk_group = sizes
    rest = [problem.text("scoring"), bool(problem["renormalize"]), SCALE]
    return [draw.normal(m, e).to(draw.dtype), top_k, bias, n_group, topk_group, *rest]


def by_id(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Weights and ids of each token in the order of the ids."""
    ids, order = outputs[1].sort(-1)
    return [outputs[0].gather(-1, order), ids]


def error(
    op: Op,
    problem: Problem,
    arguments: Sequence[Any],
    outputs: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
) -> float:
    """As of the operation, in any order of a token's experts."""
    return error_of(op, problem, arguments, by_id(outputs), by_id(references))


GROUPS = (
    Group(
        name="routing",
        op="grouped_topk",
        inputs=inputs,
        error=error,
        models={
            "DeepSeek-V3": (
                "m=1|64|1024|16384,e=256,top_k=8,n_group=8,topk_group=4,scoring=sigmoid,bias=true",
            )
        },
        tiny=("m=3,e=64,top_k=4,n_group=8,topk_group=4,scoring=sigmoid,bias=true",),
    ),
)
