"""The engines of a server: replicas of the model, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gristmill.runtime.metrics import Metrics
from gristmill.runtime.parallel.replicas import Replicas
from gristmill.serve.service import Service


def open_engines(model: str | Path, options: Mapping[str, Any]) -> Callable[[Service], Replicas]:
    """What makes the engines of a service; it blocks until the model is loaded. The service gets the registry of their metrics,
    where prometheus_client is installed.

    Args:
        options: of `EngineConfig`, as they were given.
    """

    def load(service: Service) -> Replicas:
        config = service.config
        metrics, registry = None, None
        if find_spec("prometheus_client") is not None:
            from prometheus_client import CollectorRegistry

            registry = CollectorRegistry()
            metrics = Metrics(service.name, registry, config.metrics_prefix)

        def on_event(event: str, **values: Any) -> None:
            service.loading.pop(values["replica"], None)
            service.problem = str(values["error"])
            service.restarting = not values["alive"]
            service.failed = service.restarting and not values["restarted"]
            service.log.write(event, **values)

        def on_progress(number: int, *progress: Any) -> None:
            service.loading[number] = progress

        engines = Replicas(
            model,
            config.replicas,
            route=config.route,
            metrics=metrics,
            tracer=service.tracer,
            restarts=config.restarts,
            on_event=on_event,
            on_progress=on_progress,
            **options,
        )
        service.registry = registry
        return engines

    return load
