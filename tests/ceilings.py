"""The ceilings of this CPU for caches of other processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gristmill.autotune import floor
from gristmill.kernel_registry.policy import Policy

ROUNDS = 5
"""Of measurements whose figures no test looks at."""


def keep(cache: Path) -> None:
    """Writes the ceilings into a cache, as `kernelbench` does after it has measured them; measures them once per process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(floor, "CPU_ROUNDS", ROUNDS)
        floor._keep(cache / "ceilings.json", floor._key("cpu", Policy.current()), floor.ceilings("cpu"))
