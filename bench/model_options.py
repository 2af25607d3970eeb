"""The options that select the calls of a model: --model, --tp, --weights, --mix, --decode, --prefill."""

from __future__ import annotations

from dataclasses import dataclass, fields

import click

from gristmill.bench.options import gathered
from gristmill.bench.shapes import MIX, MIXES, Call, Step, calls, load_config, model_names

_OPTIONS = (
    click.option(
        "--model",
        metavar="M",
        help=f"A config.json, a checkpoint's directory, a repository of the Hugging Face hub (org/name), or one of {', '.join(model_names())}.",
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


@dataclass(frozen=True)
class ModelOptions:
    """Their values."""

    model: str | None
    tp: int
    weights: str | None
    mix: tuple[str, ...]
    decode: tuple[str, ...]
    prefill: tuple[str, ...]

    def calls(self) -> list[Call]:
        """The calls that the options select; [] without --model. UsageError if others are given without --model."""
        if self.model is None:
            if self.tp != 1 or self.weights or self.decode or self.prefill or self.mix:
                raise click.UsageError("--tp, --weights, --mix, --decode and --prefill go with --model")
            return []
        steps = [
            *(step for name in self.mix for step in MIXES[name]),
            *(Step.decode(text) for text in self.decode),
            *(Step.prefill(text) for text in self.prefill),
        ]
        return calls(load_config(self.model), self.tp, steps or MIX, self.weights)


model_options = gathered("of_model", tuple(one.name for one in fields(ModelOptions)), ModelOptions, *_OPTIONS)
"""Adds the options to a command, as its first ones, which gets a `ModelOptions` as ``of_model``."""
