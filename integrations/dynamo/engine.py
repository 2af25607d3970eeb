"""The engine class of Dynamo's workers: token ids in, token ids out; text, HTTP and routing are Dynamo's."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from dynamo.common.backend.engine import EngineConfig, LLMEngine, LlmRegistration
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.publisher import KvEventSource, PushSource
from dynamo.common.backend.worker import WorkerConfig
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument, WorkerUnavailable

from gristmill.integrations.dynamo.cache_events import CacheEvents
from gristmill.integrations.dynamo.observers import Load
from gristmill.integrations.dynamo.requests import chunk_of, sampling_params
from gristmill.integrations.dynamo.version import HOST
from gristmill.integrations.options import engine_options
from gristmill.runtime.async_engine import AsyncEngine
from gristmill.runtime.engine import EngineDraining
from gristmill.runtime.engine_thread import EngineDeadError
from gristmill.runtime.errors import UsageError
from gristmill.runtime.hub import local_model
from gristmill.runtime.llm import LLM
from gristmill.runtime.scheduler import QueueFull, RequestTooLarge

UPDATE_SECONDS = 3600.0
"""Seconds that reading new weights may take."""
NOT_STARTED = "the engine was not started, or was cleaned up"


class GristmillEngine(LLMEngine):  # type: ignore[misc]  # Dynamo is read without types
    """One engine in one worker.

    Args:
        path: a model directory with tokenizer.json.
        name: the name under which the frontend serves the model.
        options: options of `gristmill.LLM`.
        kv_routing: whether to record events of the prefix cache for the router.

    Raises:
        HostError: a version of Dynamo that is not served.
    """

    def __init__(self, path: str, name: str, options: dict[str, Any], kv_routing: bool = True) -> None:
        HOST.require()
        self.path, self.name, self.options = path, name, options
        self.engine: AsyncEngine | None = None
        self.kv_routing = kv_routing
        self.events = CacheEvents(lambda: self._started().resync_cache_events())
        self.load = Load(name)
        self._controls: dict[str, Callable[[dict[str, Any]], Awaitable[None]]] = {
            "pause": self._pause,
            "resume": self._resume,
            "sleep": self._sleep,
            "wake_up": self._wake_up,
            "reset_prefix_cache": self._reset_prefix_cache,
        }

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[GristmillEngine, WorkerConfig]:
        """The engine of a command line, not started."""
        parser = argparse.ArgumentParser("python -m gristmill.integrations.dynamo", description=__doc__)
        parser.add_argument(
            "--model", required=True, help="a directory, or a repository of the Hugging Face hub"
        )
        parser.add_argument("--served-model-name", help="for clients; the directory's name otherwise")
        parser.add_argument(
            "--option",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help="of gristmill.LLM, for example quant=int4_g128",
        )
        parser.add_argument("--namespace", default="dynamo")
        parser.add_argument("--component", default="backend")
        parser.add_argument("--endpoint", default="generate")
        parser.add_argument(
            "--endpoint-types", help="chat,completions if the directory has a chat template, else completions"
        )
        parser.add_argument(
            "--discovery-backend", default="etcd", choices=["kubernetes", "etcd", "file", "mem"]
        )
        parser.add_argument("--request-plane", default="tcp")
        parser.add_argument("--event-plane", default=None, choices=["nats", "zmq"])
        parser.add_argument(
            "--disable-kv-routing", action="store_true", help="no events of the prefix cache, no snapshots"
        )
        arguments = parser.parse_args(argv)
        pairs = [option.partition("=") for option in arguments.option]
        if wrong := [name for name, equals, _ in pairs if not equals]:
            parser.error(f"--option takes NAME=VALUE, got {', '.join(wrong)}")
        name = arguments.served_model_name or Path(arguments.model).name
        options = engine_options({key: value for key, _, value in pairs})
        path = local_model(arguments.model)
        engine = cls(str(path), name, options, not arguments.disable_kv_routing)
        return engine, WorkerConfig(
            namespace=arguments.namespace,
            component=arguments.component,
            endpoint=arguments.endpoint,
            model_name=str(path),
            served_model_name=name,
            endpoint_types=arguments.endpoint_types or _endpoints(path),
            discovery_backend=arguments.discovery_backend,
            request_plane=arguments.request_plane,
            event_plane=arguments.event_plane,
            enable_kv_routing=engine.kv_routing,
        )

    async def start(self, worker_id: int) -> EngineConfig:
        """Load the model."""
        llm = await asyncio.to_thread(LLM, self.path, **self.options)
        self._records = self.kv_routing and llm.engine.scheduler.cache is not None
        self.engine = AsyncEngine(
            llm, metrics=self.load, on_cache_events=self.events if self._records else None
        )
        config = llm.engine.scheduler.config
        return EngineConfig(
            model=self.path,
            served_model_name=self.name,
            llm=LlmRegistration(
                context_length=config.capacity,
                kv_cache_block_size=config.block_size,
                total_kv_blocks=config.num_blocks,
                max_num_seqs=config.max_seqs,
                max_num_batched_tokens=config.max_batch_tokens,
            ),
        )

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Chunks of token ids. What cannot be served ends with Dynamo's InvalidArgument, a full queue with WorkerUnavailable."""
        engine, ids = self._started(), list(request["token_ids"])
        try:
            status = await engine.check_health()
            params = sampling_params(request, status.max_request_tokens - len(ids))
            counts = [0] * params.n
            stream = engine.stream(ids, params, request_id=context.id())
            async with aclosing(stream):
                async for chunk in stream:
                    if chunk.error is not None:
                        raise RuntimeError(str(chunk.error))
                    counts[chunk.choice] += len(chunk.token_ids)
                    yield chunk_of(chunk, len(ids), counts[chunk.choice])
        except (UsageError, RequestTooLarge) as error:
            raise InvalidArgument(str(error)) from error
        except (QueueFull, EngineDraining) as error:
            raise WorkerUnavailable(str(error)) from error
        except EngineDeadError as error:
            raise EngineShutdown(str(error)) from error

    async def abort(self, context: Any) -> None:
        """The client has left, or its request was cancelled."""
        if self.engine is not None:
            await self.engine.abort(context.id())

    async def cleanup(self) -> None:
        """End the engine's thread, and give its memory back."""
        engine, self.engine = self.engine, None
        self.events.close()
        if engine is not None:
            await engine.close()

    async def kv_event_sources(self) -> list[KvEventSource]:
        """Events of the prefix cache."""
        self._started()
        return [PushSource(on_ready=self.events.attach, dp_rank=0)] if self._records else []

    def component_metrics_dp_ranks(self) -> list[int]:
        """One engine."""
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Publish the load after each step with this publisher."""
        self.load.publisher = publisher

    async def register_prometheus(self, metrics: Any) -> None:
        """The engine's metrics on the worker's /metrics."""
        register_engine_registry(metrics, self.load.registry, prefix_filters=["gristmill:"])

    async def health_check_payload(self) -> dict[str, Any]:
        """A request of one token."""
        payload: dict[str, Any] = build_health_check_payload(bos_token_id=0)
        return payload

    def supported_controls(self) -> set[str]:
        """POST /engine/control/NAME of the worker's system server."""
        return set(self._controls)

    async def engine_control(self, control: str, body: dict[str, Any]) -> dict[str, Any]:
        """``pause`` {"mode"}, ``resume``, ``sleep`` {"level"}, ``wake_up`` {"tags"}, ``reset_prefix_cache``."""
        if control not in self._controls:
            return {"status": "error", "message": f"unsupported engine control: {control}"}
        return await _answered(self._controls[control](body or {}))

    def supported_updates(self) -> set[str]:
        """POST /engine/update/NAME."""
        return {"update_weights"}

    async def engine_update(self, update: str, body: dict[str, Any]) -> dict[str, Any]:
        """``update_weights`` {"path", "quant"}: `Engine.update_weights`."""
        if update not in self.supported_updates():
            return {"status": "error", "message": f"unsupported engine update: {update}"}
        if not isinstance((body or {}).get("path"), str):
            return {"status": "error", "message": "update_weights needs the path of a directory"}
        change = self._started().call(
            lambda e: e.update_weights(body["path"], body.get("quant")), watchdog_seconds=UPDATE_SECONDS
        )
        return await _answered(change)

    def _started(self) -> AsyncEngine:
        if self.engine is None:
            raise EngineShutdown(NOT_STARTED)
        return self.engine

    async def _pause(self, body: dict[str, Any]) -> None:
        await self._started().pause(body.get("mode", "wait"))

    async def _resume(self, body: dict[str, Any]) -> None:
        await self._started().resume()

    async def _sleep(self, body: dict[str, Any]) -> None:
        await self._started().call(lambda e: e.sleep(body.get("level", 1)))

    async def _wake_up(self, body: dict[str, Any]) -> None:
        await self._started().call(
            lambda e: e.wake_up(**({"parts": body["tags"]} if body.get("tags") else {}))
        )

    async def _reset_prefix_cache(self, body: dict[str, Any]) -> None:
        await self._started().call(lambda e: e.reset_prefix_cache())


def _endpoints(folder: Path) -> str:
    """The endpoints that the frontend can serve: it refuses chat for a model without a chat template."""
    settings = folder / "tokenizer_config.json"
    chats = any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json"))
    if settings.is_file():
        chats |= "chat_template" in json.loads(settings.read_text(encoding="utf-8"))
    return "chat,completions" if chats else "completions"


async def _answered(work: Awaitable[None]) -> dict[str, Any]:
    """Dynamo's answer to a control."""
    try:
        await work
    except (UsageError, EngineDeadError) as error:
        return {"status": "error", "message": str(error)}
    return {"status": "ok"}
