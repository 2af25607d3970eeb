"""The engines of a server: replicas of the model, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gristmill.runtime.parallel.replicas import Replicas
from gristmill.serve.service import Service


def open_engines(model: str | Path, options: Mapping[str, Any]) -> Callable[[Service], Replicas]:
    """What makes the engines of a service; it blocks until the model is loaded.

    Args:
        options: of `EngineConfig`, as they were given.
    """

    def load(service: Service) -> Replicas:
        config = service.config
        return Replicas(model, config.replicas, route=config.route, **options)

    return load
