"""Steps that take time: a request of thousands of tokens outlives any stall of its client, on a machine of any speed.

As a command, ``python -m tests.integrations.slow_steps MODULE ARGUMENTS...``: run the module as a command whose engines have such steps."""

from __future__ import annotations

import runpy
import sys
import time

from gristmill.runtime.engine import Engine
from gristmill.runtime.scheduler import RequestOutput

SECONDS = 0.03
"""The least time of a step: 3000 tokens take a minute and a half."""
_step = Engine.step


def slow_step(engine: Engine) -> list[RequestOutput]:
    """`Engine.step`, later."""
    time.sleep(SECONDS)
    return _step(engine)


def slow_down() -> None:
    """All engines of this process, for good."""
    Engine.step = slow_step  # type: ignore[method-assign]


if __name__ == "__main__":
    slow_down()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
