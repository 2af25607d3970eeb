"""Sampling: from logits to token ids, each request by its own parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How one row of logits is sampled. seed: the request's. index: which output token of the request this is, from 0."""

    params: SamplingParams
    seed: int
    index: int


class Sampler:
    def __init__(self, plans: Plans, vocab: int) -> None:
        self.plans = plans

    def __call__(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
        return logits.float().argmax(-1).tolist()
