"""Log-probabilities of tokens: the log-softmax of the model's logits before processors, temperature and filters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gristmill.runtime.batch import send
from gristmill.runtime.scheduler import TokenLogprobs

ROWS = 64
"""Rows of logits per log-softmax; bounds the memory of float32 results."""
ONE = 2.0**40
"""The largest weight of a row as an integer; the sum over a vocabulary of up to 2^22 tokens fits in int64."""


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


def row_norms(x: Tensor) -> Tensor:
    """log(sum(exp(x))) of each row of float32 [rows, vocab] -> [rows, 1].

    Weights are added as integers: the order in which a reduction adds depends on its number of rows, and the same logits have the same
    log-probabilities in every batch.
    """
    peak = x.amax(1, keepdim=True)
    weights = (x - peak).exp_().mul_(ONE).to(torch.int64)
    return peak + (weights.sum(1, keepdim=True).double() / ONE).log().float()


def token_logprobs(logits: Tensor, ids: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
    """The log-probability of one token for each row of logits [rows, vocab], computed in float32.

    Args:
        ids: the token of each row.
        tops: how many of the row's most likely tokens are returned with it.
    """
    most = min(max(tops, default=0), logits.shape[1])
    parts = []
    for first in range(0, len(ids), ROWS):
        x = logits[first : first + ROWS].float()
        chosen = x.gather(1, send(ids[first : first + ROWS], torch.int64, x.device)[:, None])
        norm = row_norms(x)
        rank = 1 + (x > chosen).sum(1, keepdim=True)
        values, places = x.topk(most, 1)
        # One tensor, one copy to the host: float64 represents ranks and ids exactly.
        parts.append(torch.cat([part.double() for part in (chosen - norm, rank, values - norm, places)], 1))
    rows: list[list[float]] = torch.cat(parts).tolist() if parts else []
    logprobs = []
    for token, top, row in zip(ids, tops, rows, strict=True):
        likeliest = zip(row[2 + most : 2 + most + top], row[2 : 2 + top], strict=True)
        logprobs.append(TokenLogprobs(token, row[0], int(row[1]), tuple((int(i), p) for i, p in likeliest)))
    return logprobs
