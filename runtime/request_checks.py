"""Checks of an engine's arguments and of the parameters of requests."""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.runtime.errors import UsageError
from gristmill.runtime.sampling_params import SamplingParams


def check_integers(**values: object) -> None:
    """UsageError unless each is a positive integer or None."""
    for name, value in values.items():
        if value is not None and (type(value) is not int or value < 1):
            raise UsageError(f"{name} must be an integer of at least 1, got {value!r}")


def check_timeout(timeout: float | None) -> None:
    """UsageError unless it is a number of seconds, or None."""
    if timeout is not None and (isinstance(timeout, bool) or not timeout >= 0):
        raise UsageError(f"timeout must be seconds, at least 0, or None, got {timeout!r}")


def check_params(request_id: str, params: SamplingParams, stop_ids: Iterable[int], vocab_size: int) -> None:
    """UsageError if the parameters need text, or name ids outside the vocabulary."""
    if params.n != 1 or params.stop or params.structured_output is not None:
        raise UsageError(
            f"request {request_id!r}: the engine makes one completion of token ids; n and stop strings need LLM or AsyncEngine, "
            "and so does structured_output"
        )
    for which in ("logprobs", "prompt_logprobs"):
        if (getattr(params, which) or 0) > vocab_size:
            raise UsageError(
                f"request {request_id!r}: {which} must be at most the vocabulary's size {vocab_size}, "
                f"got {getattr(params, which)}"
            )
    if not params.edits_logits:
        return
    named: dict[str, Iterable[int]] = {
        "logit_bias": params.logit_bias,
        "allowed_token_ids": params.allowed_token_ids or (),
        "stop_token_ids": stop_ids if params.min_tokens else (),
    }
    for word in params.bad_words:
        if isinstance(word, str):
            raise UsageError(
                f"request {request_id!r}: the engine has no tokenizer: bad_words must be lists of token ids, got {word!r}"
            )
        named["bad_words"] = [*named.get("bad_words", ()), *word]
    for name, ids in named.items():
        wrong = next((token for token in ids if token >= vocab_size), None)
        if wrong is not None:
            raise UsageError(
                f"request {request_id!r}: {name} must be token ids from 0 to {vocab_size - 1}, got {wrong}"
            )
