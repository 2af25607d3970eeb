"""Log-probabilities of the runtime in vLLM's arrays: a row per token, first the token itself, then the likeliest ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from gristmill.runtime.scheduler import TokenLogprobs


def sampled(
    counts: Sequence[tuple[str, int]], found: Mapping[str, Sequence[TokenLogprobs]]
) -> LogprobsLists | None:
    """Log-probabilities of the tokens of a step; None if no request wants any.

    Args:
        counts: the requests of the step with their numbers of new tokens. Those without log-probabilities get rows of zeros, a request
            without tokens one row.
        found: by request, the log-probabilities of at least its new tokens.
    """
    if not found:
        return None
    rows: list[TokenLogprobs | None] = []
    starts = []
    for name, count in counts:
        starts.append(len(rows))
        rows += found[name][:count] if name in found else [None] * max(1, count)
    return LogprobsLists(*_arrays(rows), cu_num_generated_tokens=starts)


def of_prompt(found: Sequence[TokenLogprobs | None], top: int) -> LogprobsTensors:
    """Log-probabilities of the tokens of a prompt after its first, which nothing predicts."""
    return LogprobsTensors(*(torch.from_numpy(array) for array in _arrays(found[1:], top)))


def _arrays(rows: Sequence[TokenLogprobs | None], top: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids int32 and log-probabilities float32 [rows, 1 + most], ranks int32 [rows]."""
    width = 1 + max([top, *(len(row.top) for row in rows if row is not None)])
    ids = np.zeros((len(rows), width), np.int32)
    values = np.full((len(rows), width), -np.inf, np.float32)
    ranks = np.zeros(len(rows), np.int32)
    for place, row in enumerate(rows):
        if row is not None:
            pairs = [(row.token_id, row.logprob), *row.top]
            ids[place, : len(pairs)] = [token for token, _ in pairs]
            values[place, : len(pairs)] = [value for _, value in pairs]
            ranks[place] = row.rank
    return ids, values, ranks
