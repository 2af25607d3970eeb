"""Log-probabilities of tokens: the log-softmax of the model's logits before processors, temperature and filters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gristmill.runtime.scheduler import ScheduledRequest, TokenLogprobs

ROWS = 64
"""Rows of logits per log-softmax; bounds the memory of float32 results."""
ONE = 2.0**40
"""The largest weight of a row as an integer; the sum over a vocabulary of up to 2^22 tokens fits in int64."""


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


def log_sums(x: Tensor, peak: Tensor) -> Tensor:
    """log(sum(exp(x - peak))) of each row of float32 [rows, vocab], whose largest number is peak [rows, 1] -> float64 [rows, 1].

    Weights are added as integers: the order in which a reduction adds depends on its number of rows, and the same logits have the same
    log-probabilities in every batch.
    """
    weights = (x - peak).exp_().mul_(ONE).to(torch.int64)
    return weights.sum(1, keepdim=True).double().div_(ONE).log_()


def logprob_rows(logits: Tensor, ids: Tensor, most: int) -> Tensor:
    """The log-probability of one token for each row of logits [rows, vocab], computed in float32, on the device.

    Args:
        ids: int64 [rows], the token of each row.
        most: the number of most likely tokens that are read with it; those past the vocabulary are not.

    Returns:
        float64 [rows, 2 + 2 * most]: how many tokens are likelier, the log-probability, then those of the most likely tokens, and their ids.
        float64 represents counts and ids exactly, and one tensor is one copy to the host.
    """
    x = logits.float()
    chosen = x.gather(1, ids[:, None])
    values, places = x.topk(min(most, x.shape[1]), 1)
    peak = values[:, :1] if most else x.amax(1, keepdim=True)
    read = x.new_empty(len(x), 2 + 2 * places.shape[1], dtype=torch.float64)
    likelier, logprobs, tokens = read.split((1, 1 + places.shape[1], places.shape[1]), 1)
    torch.sum(x > chosen, 1, keepdim=True, dtype=torch.float64, out=likelier)
    torch.sub(torch.cat((chosen, values), 1).sub_(peak), log_sums(x, peak), out=logprobs)
    tokens.copy_(places)
    return read


def read_rows(parts: Sequence[Tensor], ids: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
    """What `logprob_rows` returned for the rows of these ids, in parts on the host, with the `tops` most likely tokens of each."""
    logprobs = []
    rows = (row for part in parts for row in part.tolist())
    for token, top, row in zip(ids, tops, rows, strict=True):
        first_id = 1 + len(row) // 2
        likeliest = zip(map(int, row[first_id : first_id + top]), row[2 : 2 + top], strict=True)
        logprobs.append(TokenLogprobs(token, row[1], 1 + int(row[0]), tuple(likeliest)))
    return logprobs
