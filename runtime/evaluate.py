"""Perplexity of a model on token ids, through the same runner that serves requests."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gristmill.runtime.engine import Engine
from gristmill.runtime.errors import UsageError
from gristmill.runtime.kv_cache import blocks_needed
from gristmill.runtime.scheduler import ScheduledRequest

ROWS = 512
"""Rows of logits whose log-softmax is computed at a time."""


@dataclass(frozen=True)
class Evaluation:
    """loss: mean negative log-likelihood, nats a token. tokens: predicted ones. seconds: wall clock."""

    loss: float
    perplexity: float
    tokens: int
    seconds: float


def read_tokens(path: str | Path) -> list[int]:
    """Token ids of a file of little-endian uint16; UsageError if it cannot be read or has an odd length."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    if len(data) % 2 or not data:
        raise UsageError(f"{path} must hold little-endian uint16 token ids: got {len(data)} bytes")
    return torch.frombuffer(bytearray(data), dtype=torch.uint16).to(torch.int64).tolist()


def evaluate(
    engine: Engine,
    tokens: Sequence[int],
    window: int,
    windows: int,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Mean loss over `windows` contiguous windows of `window` tokens from token 0; each predicts its last window - 1.

    progress: called with (windows done, windows in all).

    Raises:
        UsageError: too few tokens, a window that the model or the cache cannot hold, requests in flight.
    """
    config, vocab = engine.scheduler.config, engine.runner.model.config.vocab_size
    if window < 2 or windows < 1:
        raise UsageError(f"evaluation wants a window of at least 2 tokens and at least one window, got {window} and {windows}")
    if len(tokens) < window * windows:
        raise UsageError(f"{windows} windows of {window} tokens need {window * windows} tokens, got {len(tokens)}")
    if window > config.capacity:
        raise UsageError(f"a window of {window} tokens is longer than one request can be here: {config.capacity}")
    if engine.has_unfinished():
        raise UsageError("evaluation wants an idle engine: requests are unfinished")
    if max(tokens[: window * windows]) >= vocab:
        raise UsageError(f"token ids must be below the vocabulary's size {vocab}: these tokens are another model's")
    begin = time.perf_counter()
    total = 0.0
    for index in range(windows):
        total += float(window_losses(engine, tokens[index * window : (index + 1) * window]).sum())
        if progress is not None:
            progress(index + 1, windows)
    count = windows * (window - 1)
    loss = total / count
    return Evaluation(loss, math.exp(loss) if loss < 700 else math.inf, count, time.perf_counter() - begin)


@torch.inference_mode()
def window_losses(engine: Engine, ids: Sequence[int]) -> torch.Tensor:
    """Negative log-likelihood of each token but the first, float64 [len(ids) - 1], on the CPU."""
    logits = window_logits(engine, ids)[:-1]
    wanted = torch.tensor(ids[1:], device=logits.device)
    losses = [
        torch.nn.functional.cross_entropy(some, ids_of_some, reduction="none")
        for some, ids_of_some in zip(torch.split(logits, ROWS), torch.split(wanted, ROWS), strict=True)
    ]
    return torch.cat(losses).double().cpu()


def window_logits(engine: Engine, ids: Sequence[int]) -> torch.Tensor:
    """float32 logits [len(ids), vocab] of one sequence, computed in one step in blocks borrowed from the pool."""
    pool = engine.scheduler.pool
    blocks = pool.allocate(blocks_needed(len(ids), pool.block_size))
    try:
        entry = ScheduledRequest("window", 0, len(ids), False, list(ids), blocks, [])
        return engine.runner.logits([entry])
    finally:
        pool.release(blocks)
