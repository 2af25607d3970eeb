"""Sampling parameters as they come from outside: from JSON, or pickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from gristmill.runtime.errors import UsageError
from gristmill.runtime.sampling_params import SamplingParams

KNOWN = frozenset(field.name for field in fields(SamplingParams)) - {"structured_output"}


def sampling_params(values: Mapping[str, Any] | SamplingParams | None) -> SamplingParams:
    """None = greedy, 128 tokens. UsageError: an unknown name, or an invalid value."""
    if isinstance(values, SamplingParams):
        return values
    if values is not None and not isinstance(values, Mapping):
        raise UsageError(f"params must map names to values, got {type(values).__name__}")
    given = dict(values or {})
    unknown = sorted(set(map(str, given)) - KNOWN)
    if unknown:
        raise UsageError(f"SamplingParams has no {', '.join(unknown)}; known: {', '.join(sorted(KNOWN))}")
    if isinstance(bias := given.get("logit_bias"), Mapping):
        given["logit_bias"] = {_token(key): value for key, value in bias.items()}  # JSON has texts as keys
    return SamplingParams(**given)


def _token(key: object) -> object:
    return int(key) if isinstance(key, str) and key.isdecimal() else key
