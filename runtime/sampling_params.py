"""Sampling and stopping parameters of a request, validated on construction."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gristmill.runtime.errors import UsageError

MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends. The defaults are the same for every model: generation_config.json does not change them.

    Args:
        max_tokens: maximum number of output tokens.
        temperature: 0 = greedy: the token with the largest logit, ties to the smallest id.
        top_k: only the k most likely tokens; 0 = all.
        top_p: only the most likely tokens whose probabilities sum to this; 1 = all.
        min_p: only tokens whose probability is at least this fraction of the largest; 0 = all.
        seed: with the same seed a request samples the same tokens whatever else runs; None = chosen by the engine.
        stop_token_ids: ids that end the request, in addition to the model's end tokens; they are part of the output.
        ignore_eos: continue after the model's end tokens.

    Raises:
        UsageError: a value outside its range; the message names it.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        self._integer("max_tokens", 1)
        self._integer("top_k", 0)
        self._number("temperature", 0.0, math.inf, "a finite number of at least 0")
        self._number("top_p", 0.0, 1.0, "a number in (0, 1]", open_below=True)
        self._number("min_p", 0.0, 1.0, "a number in [0, 1]")
        if self.seed is not None:
            self._integer("seed", 0)
            if self.seed > MAX_SEED:
                raise UsageError(f"seed must be at most {MAX_SEED}, got {self.seed}")
        try:
            stop = tuple(self.stop_token_ids)
        except TypeError:
            raise UsageError(
                f"stop_token_ids must be a sequence of token ids, got {self.stop_token_ids!r}"
            ) from None
        if any(type(token) is not int or token < 0 for token in stop):
            raise UsageError(
                f"stop_token_ids must be token ids (non-negative integers), got {self.stop_token_ids!r}"
            )
        object.__setattr__(self, "stop_token_ids", stop)

    def _integer(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if type(value) is not int or value < least:
            raise UsageError(f"{name} must be an integer of at least {least}, got {value!r}")

    def _number(self, name: str, low: float, high: float, wanted: str, open_below: bool = False) -> None:
        value = getattr(self, name)
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not good or not low <= value <= high or (open_below and value == low):
            raise UsageError(f"{name} must be {wanted}, got {value!r}")
