"""Log-probabilities of tokens: the log-softmax of the model's logits before processors, temperature and filters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gristmill.autotune.bound import BoundPlan
from gristmill.kernel_registry.scheme import next_power_of_2
from gristmill.kernels.common import dtype_name
from gristmill.runtime.batch import fetch
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.scheduler import ScheduledRequest, TokenLogprobs

ROWS = 64
"""Tokens of a prompt whose logits are computed at a time."""
USUAL = 20
"""Most likely tokens that are read for all requests that want no more: kernels of another number would be selected when one asks for it."""
ReadRows = tuple[Tensor, Tensor]
"""On the host: log-probabilities, float32 [rows, 1 + k], and tokens, int32 [rows, 1 + k], as of the op `logprobs`."""


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Tokens of a prompt that the positions of one step predict.

    Attributes:
        first: the place of the first of them in the prompt.
        targets: their ids, at least one.
        top: the number of most likely tokens at each position.
    """

    first: int
    targets: list[int]
    top: int


@dataclass(slots=True)
class PromptLogprobs:
    """Log-probabilities of a prompt, while its chunks are computed.

    Attributes:
        ids: the token ids of the prompt.
        top: the number of most likely tokens at each position.
        logprobs: one for each token; None for the first, which nothing predicts, and for those not computed yet.
    """

    ids: list[int]
    top: int
    logprobs: list[TokenLogprobs | None]

    def part(self, entry: ScheduledRequest) -> PromptPart | None:
        """The tokens that the positions of an entry predict; None if there are none."""
        targets = self.ids[entry.start + 1 : entry.context + 1]
        return PromptPart(entry.start + 1, targets, self.top) if targets else None

    def add(self, part: PromptPart, logprobs: Sequence[TokenLogprobs]) -> None:
        """The log-probabilities of a part are known."""
        self.logprobs[part.first : part.first + len(logprobs)] = logprobs


def prompt_parts(
    entries: Sequence[ScheduledRequest], prompts: Mapping[str, PromptLogprobs]
) -> dict[str, PromptPart]:
    """By request id, the parts of these prompts that the entries of a step predict."""
    parts = {entry.id: prompts[entry.id].part(entry) for entry in entries if entry.id in prompts}
    return {name: part for name, part in parts.items() if part is not None}


class LogprobReader:
    """Reads log-probabilities of rows of logits of `vocab_size` tokens, on the device of `plans`."""

    def __init__(self, plans: Plans, vocab_size: int) -> None:
        self._plans, self._vocab_size = plans, vocab_size
        self._bound: dict[tuple[torch.dtype, int], BoundPlan] = {}
        self._plan(plans.dtype, 0)

    def read(self, logits: Tensor, places: Tensor, ids: Tensor, most: int) -> ReadRows:
        """The rows `places`, int64 [n], of logits [rows, vocab], each with the token in ids, int64 [id rows], at its place; on the way to the
        host, without synchronization.

        Args:
            most: at least so many of the most likely tokens are read with it; those past the vocabulary are not.
        """
        plan = self._plan(logits.dtype, most)
        k = plan.static.integer("k")
        logprobs = torch.empty(len(places), 1 + k, dtype=torch.float32, device=logits.device)
        tokens = torch.empty(len(places), 1 + k, dtype=torch.int32, device=logits.device)
        plan(logits, places, ids, k, self._plans.workspace(plan, len(places)), logprobs, tokens)
        return fetch(logprobs), fetch(tokens)

    def rehearse(self, logits: Tensor) -> None:
        """What a step calls for all of these logits: for a warm-up."""
        places = torch.arange(len(logits), device=logits.device)
        self.read(logits, places, torch.zeros_like(places), 0)

    def _plan(self, dtype: torch.dtype, most: int) -> BoundPlan:
        k = min(USUAL if most <= USUAL else next_power_of_2(most), self._vocab_size)
        if (dtype, k) not in self._bound:
            plan = self._plans.bind("logprobs", v=self._vocab_size, k=k, x=dtype_name(dtype))
            self._bound[dtype, k] = plan
        return self._bound[dtype, k]


def read_rows(parts: Sequence[ReadRows], ids: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
    """What `LogprobReader.read` returned for the rows of these ids, in parts, whose copies have ended, with the `tops` most likely tokens of
    each."""
    logprobs = []
    rows = (row for part in parts for row in zip(*(tensor.tolist() for tensor in part), strict=True))
    for token, top, (values, tokens) in zip(ids, tops, rows, strict=True):
        likeliest = tuple(zip(tokens[1 : 1 + top], values[1 : 1 + top], strict=True))
        logprobs.append(TokenLogprobs(token, values[0], 1 + tokens[0], likeliest))
    return logprobs
