"""A rank that keeps a log of its verifications, with a fault on request; `test_start` starts it in place of `gristmill.runtime.parallel.rank`."""

from __future__ import annotations

import json
import os
from functools import partialmethod
from pathlib import Path
from typing import Any

from gristmill.autotune.worker import Worker
from gristmill.autotune.worker_group import WorkerGroup
from gristmill.runtime.parallel import child_process, rank
from gristmill.runtime.verify_ahead import VerifiedAhead

MODULE, ENVIRONMENT = __name__, "GRISTMILL_TEST_RANK"
PLANTED: dict[str, Any] = json.loads(os.environ.get(ENVIRONMENT, "{}"))
"""log: the file; fault: what happens to verifications of `kernels`, "" or ``dies`` or ``fails``; ahead: whether any is made ahead; slow: whether
loading takes as long as they do."""


class WitnessRank(rank.Rank):
    """Notes whether it loads or warms up."""

    phase = "load"

    def warm_up(self, *arguments: Any) -> Any:
        """As `Rank.warm_up`, after a disk that is slow if the test says so."""
        if PLANTED["slow"] and self._ahead is not None and self._ahead._pool is not None:
            self._ahead._pool.shutdown()
        WitnessRank.phase = "warm_up"
        return super().warm_up(*arguments)


def verify(self: Any, op: Any, kernel: Any, config: Any, problem: Any, device: str, *, own: Any) -> Any:
    """As `Worker.verify`, with a line in the log."""
    line = [os.getpid(), WitnessRank.phase, op.name, kernel.name, str(problem)]
    with Path(PLANTED["log"]).open("a", encoding="utf-8") as log:
        log.write(json.dumps(line) + "\n")
    if any(name in kernel.name for name in PLANTED["kernels"]):
        if PLANTED["fault"] == "fails":
            return {"ok": False, "error": 1.0, "reason": "planted", "judged": True}
        self._alive().kill()
    return own(self, op, kernel, config, problem, device)


def plant() -> None:
    """Change the classes of this process."""
    for kind in (Worker, WorkerGroup):
        kind.verify = partialmethod(verify, own=kind.verify)  # type: ignore[assignment, method-assign]
    if not PLANTED["ahead"]:
        VerifiedAhead.start = lambda *arguments: None  # type: ignore[method-assign]
    rank.Rank = WitnessRank  # type: ignore[misc]


if __name__ == "__main__":
    plant()
    child_process.serve(rank.serve)
