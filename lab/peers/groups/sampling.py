"""Sampling of one token per request: temperature 0.8, the 50 largest logits, of these 0.9 of the probability."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem
from gristmill.kernels.random_inputs import Draw
from gristmill.kernels.sampling.sample import kept
from lab.peers.adapter import Arguments
from lab.peers.group import Group

TEMPERATURE, TOP_K, TOP_P = 0.8, 50, 0.9
ROUNDING = 1e-3
"""Peers sum probabilities in float32: a token at the edge of `TOP_P` may be in or out."""


def inputs(problem: Problem, device: str) -> Arguments:
    m, v = problem.integers("m", "v")
    draw = Draw(problem, 0, device, source=device)

    def each(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((m,), value, dtype=dtype, device=device)

    filters = [each(TEMPERATURE, torch.float32), each(TOP_K, torch.int32), each(TOP_P, torch.float32)]
    seeds = [torch.arange(m, device=device), each(3, torch.int64)]
    return [(3 * draw.normal(m, v)).to(draw.dtype), *filters, each(0.0, torch.float32), *seeds, None]


def error(
    op: Op,
    problem: Problem,
    arguments: Sequence[Any],
    outputs: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
) -> float:
    """The share of requests whose token the filters remove: peers draw other random numbers."""
    logits, temperature, top_k, top_p, min_p = arguments[:5]
    allowed = kept(logits.float() / temperature[:, None], top_k, top_p + ROUNDING, min_p)
    return 1.0 - float(allowed.gather(-1, outputs[0][:, None]).float().mean())


GROUPS = (
    Group(
        name="sampling",
        op="sample",
        inputs=inputs,
        error=error,
        models={
            "Llama-3-8B": ("m=1|8|64|256,v=128256",),
            "Qwen3-8B": ("m=1|64,v=151936",),
            "gpt-oss-20b": ("m=64,v=201088",),
        },
        tiny=("m=2,v=1000",),
    ),
)
