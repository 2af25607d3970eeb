"""Sampling: from logits to token ids, with parameters and a random stream per request.

The random stream is Philox4x32-10, key = the request's seed, counter = (output index, token id): a request draws the same token in any batch.
Samplers are verified by statistics; a kernel with another random stream is never chosen for a seeded request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gristmill.autotune.bound import BoundPlan
from gristmill.runtime.batch import columns, send_arrays
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.sampling_params import SamplingParams


@dataclass(slots=True)
class SamplingRow:
    """How one row of logits is sampled: with the `seed` of the request, for the output token of this `index` in it, from 0."""

    params: SamplingParams
    seed: int
    index: int


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """The parameters of `SamplingRow`s as tensors [rows] on the device: temperature, top_p, min_p float32; seed, index int64; top_k int32."""

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    index: Tensor
    top_k: Tensor


class Sampler:
    """One call of `sample` for all rows, greedy and random ones."""

    def __init__(self, plans: Plans, vocab_size: int) -> None:
        self.plans = plans
        self.vocab_size = vocab_size
        self._bound: dict[torch.dtype, BoundPlan] = {}
        self.plan = self._bind(torch.bfloat16 if plans.dtype is torch.bfloat16 else torch.float32)

    def __call__(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
        """logits [rows, vocab] -> one id per row; -1 for a row with NaN or without a finite value."""
        return self.sample(logits, rows).tolist()

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """logits [rows, vocab] -> ids int64 [rows] as in a call, on the device, without synchronization."""
        return self.sample_sent(logits, send_arrays(self.arrays(rows), logits.device))

    def arrays(self, rows: Sequence[SamplingRow]) -> list[NDArray[Any]]:
        """The parameters of rows for `sample_sent`, which are sent to the device before."""
        params, most = [row.params for row in rows], self.vocab_size
        return [
            columns(
                [
                    [one.temperature for one in params],
                    [one.top_p for one in params],
                    [one.min_p for one in params],
                ],
                np.float32,
            ),
            columns([[row.seed for row in rows], [row.index for row in rows]], np.int64),
            np.array([min(one.top_k, most) for one in params], np.int32),
        ]

    def sample_sent(self, logits: Tensor, sent: Sequence[Tensor]) -> Tensor:
        """As `sample`, with the `arrays` of the rows on the device."""
        floats, integers, top_k = sent
        count = len(top_k)
        ids = torch.empty(count, dtype=torch.int64, device=logits.device)
        parameters = (*floats[:, :count].unbind(), *integers[:, :count].unbind(), top_k)
        self.draw(logits, SamplingTensors(*parameters), ids)
        return ids

    def draw(self, logits: Tensor, sampling: SamplingTensors, ids: Tensor) -> None:
        """logits [rows, vocab] -> ids int64 [rows], on the device, without synchronization."""
        if logits.dtype is torch.float16:
            logits = logits.float()
        # Processed logits are float32, also in a bf16 model.
        plan = self.plan if logits.dtype is self.plans.dtype else self._bind(logits.dtype)
        plan(
            logits,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.seed,
            sampling.index,
            self.plans.workspace(plan, len(ids)),
            ids=ids,
        )

    def _bind(self, dtype: torch.dtype) -> BoundPlan:
        if dtype not in self._bound:
            self._bound[dtype] = self.plans.bind(
                "sample", v=self.vocab_size, x="bf16" if dtype is torch.bfloat16 else "fp32"
            )
        return self._bound[dtype]
