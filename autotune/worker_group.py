"""Verification and timing of collective operations: one child process per rank, all of which run the same task at the same time.

Every rank generates its own arguments, calls the kernel and the reference together with the others, and compares its own result. The
kernel is right if it is right on every rank.
"""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any

from gristmill.autotune.worker import TIMEOUT, Worker
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem


class WorkerGroup:
    """`world` child processes, one per rank, that verify and time collectively, with the interface of `Worker`. Rank r uses GPU r."""

    def __init__(self, world: int, timeout: float = TIMEOUT) -> None:
        self.world = world
        self.timeout = timeout
        self._workers: list[Worker] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._mutex = threading.RLock()

    def verify(self, op: Op, kernel: Kernel, config: Config, problem: Problem, device: str) -> dict[str, Any]:
        """As `Worker.verify`: the outcome of the first rank on which the kernel failed, or that of rank 0. One thread at a time."""
        with self._mutex:
            return self._together(op, kernel, config, problem, device)[0]

    def time(
        self, op: Op, kernel: Kernel, config: Config, problem: Problem, device: str, rounds: int
    ) -> dict[str, Any]:
        """As `verify`, with the times of the slowest rank: ``times``, by timing mode, microseconds per call of each round."""
        with self._mutex:
            outcomes = self._together(op, kernel, config, problem, device, rounds)
        if not outcomes[0]["ok"]:
            return outcomes[0]
        ranks = [outcome["times"] for outcome in outcomes]
        slowest = {
            mode: [max(us) for us in zip(*(own[mode] for own in ranks), strict=True)] for mode in ranks[0]
        }
        return outcomes[0] | {"times": slowest}

    def _together(
        self, op: Op, kernel: Kernel, config: Config, problem: Problem, device: str, rounds: int = 0
    ) -> list[dict[str, Any]]:
        """The outcomes of all ranks, or the one of a failure."""
        kind = device.partition(":")[0]
        missing = self._missing_devices(kind)
        if missing:
            return [{"ok": False, "error": None, "tolerance": None, "reason": missing, "judged": False}]
        if not all(worker.is_alive for worker in self._workers):
            self.close()
        if not self._workers:
            self._folder = tempfile.TemporaryDirectory(prefix="gristmill-")
            rendezvous = str(Path(self._folder.name) / "rendezvous")
            self._workers = [
                Worker(self.timeout, (str(rank), str(self.world), kind, rendezvous))
                for rank in range(self.world)
            ]
        try:
            for rank, worker in enumerate(self._workers):
                own = kind if kind == "cpu" else f"{kind}:{rank}"
                worker.send(op, kernel, config, problem, own, rounds)
            outcomes = [worker.receive() for worker in self._workers]
        except BaseException:
            self.close()
            raise
        failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if not outcome["ok"]]
        if not failed:
            return outcomes
        self.close()  # the ranks may be out of step
        rank, outcome = failed[0]
        return [outcome | {"reason": f"rank {rank}: {outcome['reason']}"}]

    def close(self) -> None:
        """End the children, after what they verify now. The next task starts them again."""
        with self._mutex:
            for worker in self._workers:
                worker.close()
            self._workers = []
            if self._folder is not None:
                self._folder.cleanup()
                self._folder = None

    def _missing_devices(self, kind: str) -> str:
        if kind == "cpu":
            return ""
        import torch

        count = torch.cuda.device_count()
        return "" if count >= self.world else f"{self.world} ranks need as many devices; torch sees {count}"


_SHARED: dict[int, WorkerGroup] = {}


def shared_group(world: int) -> WorkerGroup:
    """The worker group of this process for `world` ranks."""
    return _SHARED.setdefault(world, WorkerGroup(world))


def close_shared_groups() -> None:
    """End the children of all of them: each holds memory of the device of its rank."""
    for group in list(_SHARED.values()):
        group.close()
