"""Arguments of the harness as those of `gristmill.SamplingParams`; unknown ones are refused by name."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gristmill.runtime.errors import UsageError
from gristmill.runtime.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "seed",
)
"""Arguments of generation requests that keep their name and meaning."""


def device_of(name: str) -> str:
    """The device, or the CPU with a warning where there are no CUDA devices: the harness asks for one where its user said nothing."""
    if name.startswith("cuda") and not torch.cuda.is_available():
        logger.warning("gristmill: there is no CUDA device for %s; the model runs on the CPU", name)
        return "cpu"
    return name


def sampling_params(options: Mapping[str, Any], max_tokens: int, stop: Sequence[str]) -> SamplingParams:
    """The parameters of a generation request. The harness has normalized `options`, without stop strings and the number of tokens.

    Raises:
        UsageError: an option that is not served, or an invalid value.
    """
    given = dict(options)
    greedy = not given.pop("do_sample", False)
    unknown = sorted(set(given) - set(SAMPLING))
    if unknown:
        raise UsageError(
            f"generation options {', '.join(unknown)} are not served; known: until, max_gen_toks, do_sample, {', '.join(SAMPLING)}"
        )
    given["temperature"] = 0.0 if greedy else float(given.get("temperature", 1.0))
    if given.get("top_k") in (None, -1):  # how transformers and vLLM write "all"
        given["top_k"] = 0
    return SamplingParams(max_tokens=max_tokens, stop=stop, **given)


def integer(name: str, value: object, least: int, most: int | None = None) -> int:
    """UsageError unless the value is an integer from `least` to `most`."""
    if type(value) is not int or value < least or (most is not None and value > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise UsageError(f"{name} must be an integer {limits}, got {value!r}")
    return value


def flag(name: str, value: object) -> bool | None:
    """UsageError unless the value is a boolean or None."""
    if value is not None and not isinstance(value, bool):
        raise UsageError(f"{name} must be True or False, got {value!r}")
    return value
