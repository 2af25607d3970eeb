"""What the peers for FP8 weights share: the weight as they take it, and scales of x by column."""

from __future__ import annotations

import torch

from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.scheme import cdiv
from lab.peers.adapter import Arguments

BLOCKS, CHANNELS = "fp8_block.fp8_g128", "fp8_ch.fp8_token"


def pack(problem: Problem, arguments: Arguments) -> Arguments:
    """[codes e4m3 [N, K], scales float32] instead of the weight."""
    x, weight, *rest = arguments
    return [x, [weight.codes.view(torch.float8_e4m3fn), weight.scales.float()], *rest]


def by_column(scales: torch.Tensor, multiple: int = 1) -> torch.Tensor:
    """Scales [M, groups] with the rows of a group next to each other, groups a multiple of so many rows apart."""
    m, groups = scales.shape
    wide = torch.zeros(groups, cdiv(m, multiple) * multiple, dtype=scales.dtype, device=scales.device)
    wide[:, :m] = scales.t()
    return wide.t()[:m]
