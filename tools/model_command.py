"""Commands that load a model: its name, the options of its engine, and the loading with what is shown meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from gristmill import console

if TYPE_CHECKING:
    from gristmill.runtime.llm import LLM


class ModelCommand(click.Command):
    """A command that takes every option of what its `declarations` declare.

    They are made when the command is used: other commands need not import torch.
    """

    _declared = False

    def declarations(self) -> list[type]:
        """The classes whose fields are options."""
        from gristmill.runtime.engine_config import EngineConfig

        return [EngineConfig]

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The command's own parameters and those of the declarations, made once."""
        if not self._declared:
            from gristmill.tools.declared_options import options_of

            self._declared = True
            self.params += [option for declared in self.declarations() for option in options_of(declared)]
        return super().get_params(ctx)


class SamplingCommand(ModelCommand):
    """A model command that generates."""

    def declarations(self) -> list[type]:
        """With the parameters of sampling."""
        from gristmill.runtime.sampling_params import SamplingParams

        return [SamplingParams, *super().declarations()]


model_option = click.option(
    "--model",
    required=True,
    metavar="MODEL",
    help="Model directory in Hugging Face's layout, a GGUF file, or a repository of its hub: org/name[:FILE.gguf][@REVISION].",
)


def load_llm(
    options: dict[str, Any],
    quiet: bool,
    text: bool = False,
    chat: Mapping[str, str | None] | None = None,
    **defaults: Any,
) -> LLM:
    """The model of the options. With `text`, prompts are text, so a missing tokenizer is an error before weights are read; with `chat`,
    arguments of `Chat`, they are conversations, and so is a missing or wrong template. defaults: of the engine's options that are not given."""
    with console.err().status(f"loading {options['model']}") if not quiet else nullcontext() as line:
        from gristmill.runtime.chat.chat import Chat
        from gristmill.runtime.hub import local_model
        from gristmill.runtime.llm import LLM
        from gristmill.runtime.loader.config import open_checkpoint
        from gristmill.runtime.progress import no_bar
        from gristmill.runtime.tokenizer import Tokenizer
        from gristmill.tools.declared_options import config_of

        config = config_of(options, **defaults)
        if line is not None:
            line.stop()  # a model that is fetched has a bar of its own
        with no_bar() if quiet else nullcontext():
            path = local_model(options["model"])
        if line is not None:
            line.start()
        checkpoint = open_checkpoint(path)
        if text:
            checkpoint.config()  # of a path that is no model, the better error
            checkpoint.tokenizer()
        if chat is not None:
            Chat(checkpoint, Tokenizer(checkpoint), **chat).require_template()
    with no_bar() if quiet else nullcontext():
        return LLM.from_config(checkpoint, config)
