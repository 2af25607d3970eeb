"""The ceilings of this CPU for caches of other processes."""

from __future__ import annotations

from pathlib import Path

from gristmill.autotune import floor
from gristmill.kernel_registry.policy import Policy


def keep(cache: Path) -> None:
    """Writes the ceilings into a cache, as `kernelbench` does after it has measured them; measures them once per process."""
    floor._keep(cache / "ceilings.json", floor._key("cpu", Policy.current()), floor.ceilings("cpu"))
