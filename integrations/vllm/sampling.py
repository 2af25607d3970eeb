"""Sampling parameters: vLLM's as the runtime's, and the ones that the runtime does not serve, by name."""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Iterator, Sized
from typing import Any

import msgspec

from gristmill.runtime.errors import UsageError
from gristmill.runtime.sampling_params import SamplingParams

SERVED_BY_RUNTIME = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "prompt_logprobs",
        "repetition_penalty",
        "seed",
        "temperature",
        "top_k",
        "top_p",
    }
)
SERVED_BY_VLLM = frozenset(
    {
        "detokenize",
        "flat_logprobs",
        "ignore_eos",
        "include_stop_str_in_output",
        "max_tokens",
        "n",
        "output_kind",
        "output_text_buffer_length",
        "repetition_detection",
        "skip_clone",
        "skip_reading_prefix_cache",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "stream_interval",
        "structured_outputs",
    }
)
"""What vLLM's scheduler and front end do with the ids that a worker returns; of structured outputs they follow the grammar."""
ALL = 1 << 30
"""vLLM's -1 likeliest tokens: more than any vocabulary has."""


def unserved(params: Any) -> list[str]:
    """``name=value`` of each parameter of a `vllm.SamplingParams` that is set and that neither the runtime nor vLLM's scheduler serves.

    The fields are read from the class, so a parameter that a new version of vLLM adds is refused until it is served.
    """
    return [f"{name}={textwrap.shorten(repr(value), 60)}" for name, value in _set_fields(params)]


def _set_fields(params: Any) -> Iterator[tuple[str, Any]]:
    for field in msgspec.structs.fields(params):
        name = field.name
        if name.startswith("_") or name in SERVED_BY_RUNTIME or name in SERVED_BY_VLLM:
            continue
        value = getattr(params, name)
        empty = isinstance(value, Sized) and len(value) == 0
        # False is how a request declines a feature whose default is "if the server has it" (watermarking).
        if value is None or value is False or empty or value == field.default:
            continue
        yield name, value


def check(params: Any) -> None:
    """UsageError if the runtime cannot sample as `params` (a `vllm.SamplingParams`) says; the message names the parameters."""
    names = unserved(params)
    if names:
        raise UsageError(
            f"the gristmill worker does not serve {', '.join(names)}: leave it out, or start vLLM without "
            "--worker-cls gristmill.integrations.vllm.Worker"
        )
    translate(params)


def translate(params: Any) -> SamplingParams:
    """The runtime's parameters; stopping is vLLM's. UsageError: a value that the runtime does not take.

    bad_words are token ids, which vLLM's front end has made of the texts by the time that a worker sees them.
    """
    edits: dict[str, Any] = {
        "presence_penalty": float(params.presence_penalty),
        "frequency_penalty": float(params.frequency_penalty),
        "repetition_penalty": float(params.repetition_penalty),
        "logit_bias": params.logit_bias or {},
        "bad_words": params.bad_words_token_ids or (),
        "allowed_token_ids": params.allowed_token_ids,
        "min_tokens": params.min_tokens,
        "max_tokens": max(1, params.min_tokens, params.max_tokens or 1),
        "seed": params.seed,
        "logprobs": _count(params.logprobs),
        "prompt_logprobs": _count(params.prompt_logprobs),
    }
    if params.temperature == 0:  # vLLM raises other values to 0.01
        return SamplingParams(**edits)
    return SamplingParams(
        temperature=float(params.temperature),
        top_k=max(params.top_k, 0),  # -1 is vLLM's other name for "all"
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        **edits,
    )


def _count(likeliest: int | None) -> int | None:
    return ALL if likeliest == -1 else likeliest


def seed_of(params: SamplingParams, base: int, request_id: str) -> int:
    """The seed of a request: its own, or one that its id and the engine's seed give, the same after a preemption."""
    if params.seed is not None:
        return params.seed
    digest = hashlib.blake2b(f"{base} {request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
