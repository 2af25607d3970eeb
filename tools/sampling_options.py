"""The command line's options for sampling: one for each parameter of SamplingParams that a command can state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

F = Callable[..., None]

OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "max_tokens": (
        "Maximum number of tokens to generate.",
        {"type": int, "default": 128, "show_default": True, "metavar": "N"},
    ),
    "temperature": (
        "0: greedy. Higher values give more varied text.",
        {"type": float, "default": 0.0, "show_default": True, "metavar": "T"},
    ),
    "top_k": ("Sample from the K most likely tokens. 0: all.", {"type": int, "default": 0, "metavar": "K"}),
    "top_p": (
        "Sample from the most likely tokens whose probabilities sum to P.",
        {"type": float, "default": 1.0, "metavar": "P"},
    ),
    "min_p": (
        "Sample from tokens at least P times as likely as the most likely one.",
        {"type": float, "default": 0.0, "metavar": "P"},
    ),
    "seed": (
        "The same seed gives the same tokens. Default: a fixed seed of the engine.",
        {"type": int, "metavar": "S"},
    ),
    "repetition_penalty": (
        "Divide the logits of tokens in prompt and output by X if positive, multiply if negative. 1: off.",
        {"type": float, "default": 1.0, "metavar": "X"},
    ),
    "presence_penalty": (
        "Subtract X from the logits of tokens in the output.",
        {"type": float, "default": 0.0, "metavar": "X"},
    ),
    "frequency_penalty": (
        "Subtract X from a token's logit for every time it is in the output.",
        {"type": float, "default": 0.0, "metavar": "X"},
    ),
    "min_tokens": (
        "Sample no end token before N tokens.",
        {"type": int, "default": 0, "metavar": "N"},
    ),
    "ignore_eos": ("Continue after the model's end tokens.", {"is_flag": True}),
    "stop": (
        "End the text before this one. May be given several times.",
        {"multiple": True, "metavar": "TEXT"},
    ),
    "bad_words": (
        "Do not generate this text. May be given several times.",
        {"multiple": True, "metavar": "TEXT"},
    ),
    "logprobs": (
        "With --json: log-probabilities of the tokens, and of the N most likely at each position.",
        {"type": int, "metavar": "N"},
    ),
}
"""Parameter -> help, settings of its option."""
NAMES = {"bad_words": "--bad-word"}


def sampling_options(function: F) -> F:
    """Add the options; the command gets them by the names of the parameters."""
    for parameter, (text, settings) in reversed(OPTIONS.items()):
        name = NAMES.get(parameter, "--" + parameter.replace("_", "-"))
        function = click.option(name, parameter, help=text, **settings)(function)
    return function
