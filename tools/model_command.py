"""Commands that load a model: its name, the options of its engine, and the loading with what is shown meanwhile."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from gristmill import console

if TYPE_CHECKING:
    from gristmill.runtime.llm import LLM


class ModelCommand(click.Command):
    """A command that takes every option of `EngineConfig`, and with ``sampling`` every parameter of `SamplingParams`.

    They are made when the command is used: other commands need not import torch.
    """

    sampling = False

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The command's own parameters and those of the declarations, made once."""
        if not self._declared:
            from gristmill.runtime.engine_config import EngineConfig
            from gristmill.runtime.sampling_params import SamplingParams
            from gristmill.tools.declared_options import options_of

            self._declared = True
            self.params += [
                *(options_of(SamplingParams) if self.sampling else ()),
                *options_of(EngineConfig),
            ]
        return super().get_params(ctx)

    _declared = False


class SamplingCommand(ModelCommand):
    """A model command that generates."""

    sampling = True


model_option = click.option(
    "--model",
    required=True,
    metavar="MODEL",
    help="Model directory in Hugging Face's layout, a GGUF file, or a repository of its hub: org/name[:FILE.gguf][@REVISION].",
)


def load_llm(options: dict[str, Any], quiet: bool, text: bool = False, **defaults: Any) -> LLM:
    """The model of the options. With `text`, prompts are text, so a missing tokenizer is an error before weights are read.
    defaults: of the engine's options that are not given."""
    with console.err().status(f"loading {options['model']}") if not quiet else nullcontext() as line:
        from gristmill.runtime.hub import local_model
        from gristmill.runtime.llm import LLM
        from gristmill.runtime.loader.config import open_checkpoint
        from gristmill.runtime.progress import no_bar
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
    with no_bar() if quiet else nullcontext():
        return LLM.from_config(checkpoint, config)
