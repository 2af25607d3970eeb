"""The options that select the calls of a model: --model, --tp, --weights, --mix, --decode, --prefill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from gristmill.bench.shapes import MIX, MIXES, Call, Step, calls, load_config, model_names

_OPTIONS = (
    click.option(
        "--model",
        metavar="M",
        help=f"A config.json, a checkpoint's directory, or one of {', '.join(model_names())}.",
    ),
    click.option(
        "--tp",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="With --model: tensor-parallel size.",
    ),
    click.option(
        "--weights", metavar="S", help="With --model: a quantization scheme, instead of the checkpoint's."
    ),
    click.option(
        "--mix",
        type=click.Choice([*MIXES]),
        multiple=True,
        help="With --model: named steps, together with those of --decode and --prefill. Default: serve.",
    ),
    click.option(
        "--decode",
        metavar="NxC",
        multiple=True,
        help="With --model: a decode step of N sequences of C tokens; NxC*W gives it a weight. Repeatable.",
    ),
    click.option(
        "--prefill",
        metavar="NxT",
        multiple=True,
        help="With --model: a prefill step of N prompts of T tokens.",
    ),
)


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command, as its first ones."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def model_calls(
    model: str | None,
    tp: int,
    weights: str | None,
    decode: tuple[str, ...],
    prefill: tuple[str, ...],
    mix: tuple[str, ...] = (),
) -> list[Call]:
    """The calls that the options select; [] without --model. UsageError if others are given without --model."""
    if model is None:
        if tp != 1 or weights or decode or prefill or mix:
            raise click.UsageError("--tp, --weights, --mix, --decode and --prefill go with --model")
        return []
    steps = [
        *(step for name in mix for step in MIXES[name]),
        *(Step.decode(text) for text in decode),
        *(Step.prefill(text) for text in prefill),
    ]
    return calls(load_config(model), tp, steps or MIX, weights)
