"""A server in a thread, over an engine of the test's choice."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop

from gristmill import LLM, AsyncEngine
from gristmill.runtime.chat.chat import Chat
from gristmill.runtime.explain import explain_plans
from gristmill.serve.config import ServeConfig
from gristmill.serve.launch import Server
from gristmill.serve.request_log import RequestLog
from gristmill.serve.service import Service

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "models" / "docs-llama"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class LocalEngine(AsyncEngine):
    """An engine in this process, with the interface of `Replicas` that a server uses."""

    async def status(self) -> list[Any]:
        """The status of this one."""
        return [await self.check_health()]

    async def explain(self) -> list[Any]:
        """Which kernels ran."""
        engine = self._thread.engine
        return [explain_plans(engine.model.plans if self._pooling else engine.runner.model.plans)]


@contextmanager
def serving(service: Service, load: Any) -> Iterator[str]:
    """The address of a server that runs while the block does."""
    urls: list[str] = []
    begun = threading.Event()
    failures: list[BaseException] = []
    loops: list[Any] = []
    server = Server(service, load)

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        await server.run(lambda url: (urls.append(url), begun.set()), signals=())  # type: ignore[arg-type]

    def work() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(main())
        except BaseException as error:
            failures.append(error)
        finally:
            begun.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    begun.wait(60)
    if failures:
        raise failures[0]
    try:
        yield urls[0]
    finally:
        loops[0].call_soon_threadsafe(server.stop)
        thread.join(60)
        if failures:
            raise failures[0]
        if thread.is_alive():
            raise TimeoutError("the server did not end")


def until_ready(service: Service) -> None:
    """Wait for the engine, which a server loads after it listens."""
    end = time.monotonic() + 60
    while service.engine is None:
        if time.monotonic() > end:
            raise TimeoutError("the server has no engine")
        time.sleep(0.005)


def service_of(llm: LLM, **options: Any) -> Service:
    """What a server of a loaded model serves."""
    config = ServeConfig(
        **{"port": 0, "drain_seconds": 5.0, "log_file": os.environ.get("SERVE_LOG", "/dev/null"), **options}
    )
    return Service(
        config,
        tuple(config.served_model_name) or ("docs-llama",),
        llm.tokenizer,
        Chat(llm.path, llm.tokenizer, template=config.chat_template or CHATML),
        llm.config.max_position,
        llm.config.vocab_size,
        {},
        RequestLog(config.log_file),
        pools=llm.pools,
    )
