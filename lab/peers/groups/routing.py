"""The choice of experts, with groups of experts and a bias as in DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gristmill.autotune.metrics import error_of
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem
from lab.peers.arguments import of_operation
from lab.peers.group import Group


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
        inputs=of_operation,
        error=error,
        models={
            "DeepSeek-V3": (
                "m=1|64|1024|16384,e=256,top_k=8,n_group=8,topk_group=4,scoring=sigmoid,bias=true",
            )
        },
        tiny=("m=3,e=64,top_k=4,n_group=8,topk_group=4,scoring=sigmoid,bias=true",),
    ),
)
