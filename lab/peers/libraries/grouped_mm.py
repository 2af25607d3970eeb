"""torch's product of rows by the weight of their expert, `torch._grouped_mm`, in bf16."""

from __future__ import annotations

from functools import partial

import torch

from gristmill.kernel_registry.problem import Problem
from lab.peers.adapter import Adapter, Arguments, Peer, Run


def accepts(problem: Problem) -> str | None:
    """Of rows in the order of experts, without what follows the product."""
    plain = problem.text("w") == "bf16" and not problem.flags("epilogue") and not problem["gather"]
    return None if plain else "called for bf16 in the order of experts, without an epilogue"


def pack(problem: Problem, arguments: Arguments) -> Arguments:
    """Dense weights."""
    x, weight, *rest = arguments
    return [x, weight.dense(), *rest]


def bind(problem: Problem, arguments: Arguments) -> Run:
    x, weight, offsets = arguments[:3]
    return partial(torch._grouped_mm, x, weight.transpose(1, 2), offs=offsets[1:])


PEER = Peer(
    name="grouped_mm",
    package="torch",
    modules=("torch",),
    adapters=(Adapter(op="grouped_linear", accepts=accepts, pack=pack, bind=bind),),
)
