"""``gristmill serve``: a model behind OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from gristmill import console
from gristmill.runtime.errors import UsageError
from gristmill.tools.model_command import ModelCommand


class ServeCommand(ModelCommand):
    """A model command that serves."""

    def declarations(self) -> list[type]:
        """With the options of the server."""
        from gristmill.serve.config import ServeConfig

        return [ServeConfig, *super().declarations()]


@click.command(name="serve", cls=ServeCommand)
@click.argument("model", required=False)
def serve(model: str | None, **options: Any) -> None:
    """Serve a model to clients of OpenAI's and Anthropic's APIs.

    MODEL is a Hugging Face directory, a GGUF file, or the id of a model on the Hugging Face hub. Without it, SmolLM2-135M-Instruct is fetched
    (93 MB, Apache-2.0).

    \b
    gristmill serve
    gristmill serve DIR --quant int4_g128 --port 8000 --api-key-file keys
    curl http://127.0.0.1:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello"}]}'

    The page at /ui has a chat, the load of the engines, and which kernels run. SIGTERM drains: running requests have --drain-seconds.
    """
    from gristmill.runtime.default_model import DEFAULT, default_model
    from gristmill.runtime.engine_config import EngineConfig
    from gristmill.serve.config import ServeConfig
    from gristmill.serve.engines import open_engines
    from gristmill.serve.launch import Server, make_service
    from gristmill.tools.declared_options import given

    try:
        import uvloop
    except ImportError as error:
        raise UsageError("the server needs more packages: pip install 'gristmill[serve]'") from error
    config = ServeConfig(**given(ServeConfig, options))
    stated = given(EngineConfig, options)
    engine = EngineConfig.of(stated)  # before anything is started
    chosen = DEFAULT if model is None else None
    name = default_model() if model is None else model
    service = make_service(name, config, engine, shown=None if chosen is None else chosen.name)
    load = None if config.render_only else open_engines(name, stated)

    def listening(url: str) -> None:
        console.err().print(
            f"gristmill serves {service.name} at {url} (page: {url}/ui)", highlight=False, soft_wrap=True
        )

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(Server(service, load).run(listening))
