"""Arguments of problems as models have them: drawn on the device, without the traps that verification lays in memory nobody owns.

Problems that differ in their rows of activations only share their weights, which take longest to make.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels import given_codes
from gristmill.kernels.attention.ragged_inputs import UNUSED_BLOCK
from gristmill.kernels.moe._clamped import ALPHA, LIMIT
from gristmill.kernels.moe.moe.op import NO_ORDER
from gristmill.kernels.quantized_inputs import random_weight
from gristmill.kernels.random_inputs import Draw
from gristmill.quant import QuantTensor
from gristmill.runtime.layers.codes import new_codes
from lab.peers.adapter import Arguments


def of_operation(problem: Problem, device: str) -> Arguments:
    """Those of verification. Memory that no sequence owns has finite numbers and valid blocks: peers may read it."""
    arguments = default_registry().op(problem.op).inputs(problem, 0, device)
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and argument.is_floating_point():
            argument.nan_to_num_(0.0)
        elif isinstance(argument, torch.Tensor) and argument.dtype == torch.int32:
            argument[argument == UNUSED_BLOCK] = 0
    return arguments


@lru_cache(maxsize=1)
def _weight(static: Problem, device: str) -> QuantTensor:
    return random_weight(Draw(static, 0, device, source=device), *static.integers("n", "k"))


def linear(problem: Problem, device: str) -> Arguments:
    """x and a weight; with codes, x as quantized."""
    m, n, k = problem.integers("m", "n", "k")
    weight = _weight(default_registry().op("linear").static(problem), device)
    draw = Draw(problem, 1, device, source=device)
    (x,) = draw.stored(draw.rows(m, k, spread=0.5))
    return [x, weight, None, None, False, n, None, *(_codes(x, weight) if problem["codes"] else (None, None))]


def _codes(x: torch.Tensor, weight: QuantTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of x in memory as a layer's kernel writes them; peers are given them in their own layouts."""
    form = str(weight.scheme.activation)
    made = new_codes(x, x.shape[-1], form)
    for there, value in zip(made, given_codes.codes_of(x, form), strict=True):
        there.copy_(value)
    return made


@lru_cache(maxsize=1)
def _experts(static: Problem, device: str) -> list[QuantTensor | torch.Tensor | None]:
    """w13, w2 and their biases."""
    draw, (e, h, i) = Draw(static, 0, device, source=device), static.integers("e", "h", "i")
    flags = static.flags("epilogue")
    biases = [
        draw.stored(draw.normal(e, rows))[0] if name in flags else None
        for name, rows in (("w13_bias", 2 * i), ("w2_bias", h))
    ]
    return [random_weight(draw, e, 2 * i, h), random_weight(draw, e, h, i), *biases]


def _routing(problem: Problem, device: str, index: int, ranks: int) -> Arguments:
    """Tokens, and the weights and ids of their experts. Experts are those of all `ranks`; those of others than the first are -1."""
    draw, (m, k, e, h) = (
        Draw(problem, index + 1, device, source=device),
        problem.integers("m", "top_k", "e", "h"),
    )
    (x,) = draw.stored(draw.rows(m, h, spread=0.5))
    weights, ids = draw.uniform(m, e * ranks).topk(k)
    weights /= weights.sum(-1, keepdim=True)
    return [x, weights, torch.where(ids < e, ids, -1).int()]


def experts(problem: Problem, device: str, ranks: int = 1) -> Arguments:
    """Tokens with a random choice of experts each, and the experts' weights."""
    w13, w2, *biases = _experts(default_registry().op("moe").static(problem), device)
    clamp = "clamp" in problem.flags("epilogue")
    rest = [problem.integer("i"), None, *biases, clamp, ALPHA, LIMIT]
    return [*_routing(problem, device, 0, ranks), w13, w2, *rest, None, None, "silu", True, *NO_ORDER]


def other_routing(problem: Problem, arguments: Arguments, index: int, ranks: int = 1) -> Arguments:
    """The same weights with other tokens, which choose other experts."""
    return [*_routing(problem, str(arguments[0].device), index, ranks), *arguments[3:]]


@lru_cache(maxsize=1)
def _expert_weight(static: Problem, device: str) -> QuantTensor:
    return random_weight(Draw(static, 0, device, source=device), *static.integers("e", "n", "k"))


def _rows(problem: Problem, device: str, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in the order of their experts, which are random, and the experts' offsets."""
    draw, (m, e, k) = Draw(problem, index + 1, device, source=device), problem.integers("m", "e", "k")
    (x,) = draw.stored(draw.rows(m, k, spread=0.5))
    counts = torch.bincount((draw.uniform(m) * e).long().clamp(max=e - 1), minlength=e)
    return x, torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()


def rows_of_experts(problem: Problem, device: str) -> Arguments:
    """Rows of experts, and the experts' weights."""
    weight = _expert_weight(default_registry().op("grouped_linear").static(problem), device)
    x, offsets = _rows(problem, device, 0)
    return [x, weight, offsets, None, 1, False, problem.integer("n"), None, False, ALPHA, LIMIT]


def other_rows(problem: Problem, arguments: Arguments, index: int) -> Arguments:
    """The same weights with other rows, of other experts."""
    x, offsets = _rows(problem, str(arguments[0].device), index)
    return [x, arguments[1], offsets, *arguments[3:]]
