"""The deployment with slow steps, in a module that replicas import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill.integrations.ray.serve import Server
from tests.integrations.slow_steps import slow_down


class SlowServer(Server):
    """`Server`, with steps that take at least `tests.integrations.slow_steps.SECONDS`."""

    def __init__(self, model: str, options: Mapping[str, Any] | None = None) -> None:
        slow_down()
        super().__init__(model, options)
