"""Sampling parameters as they come from outside: from JSON, or pickled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill.runtime.errors import UsageError
from gristmill.runtime.sampling_params import SamplingParams


def sampling_params(values: Mapping[str, Any] | SamplingParams | None) -> SamplingParams:
    """None = greedy, 128 tokens. UsageError: an unknown name, or an invalid value."""
    if isinstance(values, SamplingParams):
        return values
    if values is not None and not isinstance(values, Mapping):
        raise UsageError(f"params must map names to values, got {type(values).__name__}")
    return SamplingParams.of(values or {})
