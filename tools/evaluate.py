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
from gristmill.runtime.integers import integers, plain
from gristmill.runtime.scheduler import ScheduledRequest

STEP_TOKENS = 4096
"""The largest step on a GPU, in tokens: single windows would not fill it."""
ROWS = 512
"""Rows of logits per log-softmax."""


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`.

    Attributes:
        loss: mean negative log-likelihood, nats per token.
        perplexity: exp(loss).
        tokens: predicted tokens.
        seconds: wall clock.
        window_losses: loss of each window, nats per token.
    """

    loss: float
    perplexity: float
    tokens: int
    seconds: float
    window_losses: tuple[float, ...]


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

    Args:
        tokens: a list, or an array or tensor of one dimension.
        progress: called with (windows done, windows in all).

    Raises:
        UsageError: too few tokens, a window larger than the model or the cache allows, requests in flight.
    """
    config, vocab = engine.scheduler.config, engine.runner.model.config.vocab_size
    ids, window, windows = integers(tokens, "tokens"), plain(window), plain(windows)
    if window < 2 or windows < 1:
        raise UsageError(
            f"evaluation needs a window of at least 2 tokens and at least one window, got {window} and {windows}"
        )
    if len(ids) < window * windows:
        raise UsageError(
            f"{windows} windows of {window} tokens need {window * windows} tokens, got {len(ids)}"
        )
    if window > config.capacity:
        raise UsageError(
            f"a window of {window} tokens is longer than the longest possible request: {config.capacity}"
        )
    if engine.has_unfinished():
        raise UsageError("evaluation needs an idle engine: requests are unfinished")
    used = ids[: window * windows]
    if min(used) < 0 or max(used) >= vocab:
        raise UsageError(f"token ids must be from 0 to {vocab - 1}: these tokens are of another model")
    begin = time.perf_counter()
    losses: list[float] = []
    at_once = windows_at_once(
        engine.runner.device, window, windows, config.num_blocks // config.places(window)
    )
    for index in range(0, windows, at_once):
        some = [ids[i * window : (i + 1) * window] for i in range(index, index + at_once)]
        losses += losses_of(engine, some).mean(1).tolist()
        if progress is not None:
            progress(index + at_once, windows)
    loss = math.fsum(losses) / windows
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return Evaluation(loss, perplexity, windows * (window - 1), time.perf_counter() - begin, tuple(losses))


def windows_at_once(device: torch.device, window: int, windows: int, most: int) -> int:
    """Windows per step: one on a CPU; on a GPU as many as fill it, at most `most` and a divisor of `windows`."""
    limit = min(most, STEP_TOKENS // window) if device.type == "cuda" else 1
    return max((n for n in range(1, limit + 1) if windows % n == 0), default=1)


def window_losses(engine: Engine, ids: Sequence[int]) -> torch.Tensor:
    """Negative log-likelihood of each token but the first, float64 [len(ids) - 1], on the CPU."""
    return losses_of(engine, [ids])[0]


@torch.inference_mode()
def losses_of(engine: Engine, windows: Sequence[Sequence[int]]) -> torch.Tensor:
    """`window_losses` of windows of one length, computed in one step: float64 [windows, length - 1], on the CPU."""
    length = len(windows[0])
    logits = _logits(engine, windows).view(len(windows), length, -1)[:, :-1].flatten(0, 1)
    targets = torch.tensor([list(ids[1:]) for ids in windows], device=logits.device).flatten()
    losses = [
        torch.nn.functional.cross_entropy(some, ids_of_some, reduction="none")
        for some, ids_of_some in zip(torch.split(logits, ROWS), torch.split(targets, ROWS), strict=True)
    ]
    return torch.cat(losses).double().cpu().view(len(windows), length - 1)


def window_logits(engine: Engine, ids: Sequence[int]) -> torch.Tensor:
    """float32 logits [len(ids), vocab] of one sequence, computed in one step in blocks borrowed from the pool."""
    return _logits(engine, [ids])


def _logits(engine: Engine, windows: Sequence[Sequence[int]]) -> torch.Tensor:
    pool, each = engine.scheduler.pool, engine.scheduler.config.places(len(windows[0]))
    blocks = pool.allocate(each * len(windows))
    try:
        entries = [
            ScheduledRequest(
                f"window {i}", 0, len(ids), False, list(ids), blocks[i * each : (i + 1) * each], []
            )
            for i, ids in enumerate(windows)
        ]
        return engine.runner.logits(entries)
    finally:
        pool.release(blocks)
