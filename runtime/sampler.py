"""Sampling: from logits to token ids, with parameters and a random stream per request.

The random stream is Philox4x32-10, key = the request's seed, counter = (output index, token id): a request draws the same token in any batch.
Samplers are verified by statistics; a kernel with another random stream is never chosen for a seeded request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gristmill.autotune.bound import BoundPlan
from gristmill.runtime.batch import send, send_parts
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
        count, device = len(rows), logits.device
        params = [row.params for row in rows]
        shares = [w.temperature for w in params], [w.top_p for w in params], [w.min_p for w in params]
        temperature, top_p, min_p = send_parts(shares, torch.float32, device)
        seed, index = send_parts(([r.seed for r in rows], [r.index for r in rows]), torch.int64, device)
        top_k = send([min(row.params.top_k, self.vocab_size) for row in rows], torch.int32, device)
        ids = torch.empty(count, dtype=torch.int64, device=device)
        self.draw(logits, SamplingTensors(temperature, top_p, min_p, seed, index, top_k), ids)
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
