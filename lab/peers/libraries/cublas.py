"""cuBLAS by torch, over weights in the dtype of x."""

from __future__ import annotations

from functools import partial

import torch

from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.scheme import QuantScheme
from lab.peers.adapter import Adapter, Arguments, Peer, Run


def accepts(problem: Problem) -> str | None:
    activation = QuantScheme.parse(problem.text("w")).activation
    return None if activation is None else "called with activations as they are"


def pack(problem: Problem, arguments: Arguments) -> Arguments:
    x, weight, *rest = arguments
    return [x, weight.dequantize().to(x.dtype), *rest]


def bind(problem: Problem, arguments: Arguments) -> Run:
    return partial(torch.nn.functional.linear, arguments[0], arguments[1])


PEER = Peer(
    name="cublas",
    package="torch",
    modules=("torch",),
    adapters=(Adapter(op="linear", accepts=accepts, pack=pack, bind=bind),),
)
