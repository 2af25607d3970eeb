"""Log-probabilities of the runtime in vLLM's arrays: a row per token, first the token itself, then the likeliest ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from gristmill.runtime.scheduler import TokenLogprobs


def sampled(names: Sequence[str], found: Mapping[str, TokenLogprobs]) -> LogprobsLists | None:
    """Log-probabilities of the tokens of a step: a row per request of the step, zeros for those without; None if no request wants any."""
    if not found:
        return None
    return LogprobsLists(*_arrays([found.get(name) for name in names]))


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
