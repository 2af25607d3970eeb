"""Verification in a child process: a fault kills the child, not the caller, and is recorded.

The parent writes one JSON task per line and reads one JSON outcome per line. Run as ``python -m gristmill.autotune.worker``; with the
arguments RANK, WORLD, cpu or cuda, and a file for the rendezvous it is one rank of a worker group, which verifies collective operations together.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from gristmill.autotune.child import Child, serve
from gristmill.autotune.compilations import prepare_triton
from gristmill.autotune.errors import UnverifiableError
from gristmill.autotune.forks import Fork, fork, forking
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry

TIMEOUT = 600.0
"""Seconds one verification may take, compilation included."""
COLLECTIVE_SECONDS = 60.0
"""Seconds that a rank of a worker group waits for the others in one collective call."""


class Worker(Child):
    """A child process that verifies, started with `arguments` on its command line."""

    def __init__(self, timeout: float = TIMEOUT, arguments: Sequence[str] = ()) -> None:
        super().__init__(("-m", "gristmill.autotune.worker", *arguments), timeout)
        self._may_fork = not arguments  # a rank has a command line

    def start(self) -> subprocess.Popen[str] | Fork:
        """A new process, within `forked_workers` a fork of this one."""
        return (fork() if self._may_fork else None) or super().start()

    def verify(self, op: Op, kernel: Kernel, config: Config, problem: Problem, device: str) -> dict[str, Any]:
        """The outcome as a dict (ok, error, tolerance, reason, judged); a dead or silent child is an outcome too.

        If the fault is not the kernel's, `judged` is False and there is no verdict.
        """
        self.send(op, kernel, config, problem, device)
        outcome = self.receive()
        if not outcome["ok"] and outcome["error"] is None and device != "cpu":
            self.close()  # a fault persists in the device context and would be attributed to the next kernel
        return outcome

    def send(
        self, op: Op, kernel: Kernel, config: Config, problem: Problem, device: str, rounds: int = 0
    ) -> None:
        """Start a verification; with rounds, in a rank of a worker group, its timing too. `receive` returns the outcome."""
        self.write(
            {
                "op": op.name,
                "kernel": kernel.name,
                "config": dict(config),
                "problem": str(problem),
                "device": device,
                "rounds": rounds,
            }
        )

    def receive(self) -> dict[str, Any]:
        """The outcome of the verification that was started last."""
        try:
            outcome: dict[str, Any] = self.read()
        except TimeoutError as error:
            return _failure(f"verification: {error}")
        except ChildProcessError as error:
            return _failure(f"killed its process ({error})")
        return outcome


class Workers:
    """Verification processes for the threads of this process: one, but while `allow` lets more run at a time."""

    def __init__(self, first: Worker | None = None) -> None:
        self.first = first or Worker()
        self._idle = [self.first]
        self.allowed: list[int] = []  # what `allow` lets run now
        self._busy: list[Worker] = []
        self._waiting = 0  # threads that are not patient
        self._own = threading.local()
        self._changed = threading.Condition()

    @contextmanager
    def one(self) -> Iterator[Worker]:
        """A worker for one thread; waits while as many as are allowed are busy, and a patient thread while others wait."""
        with self._changed:
            patient = getattr(self._own, "is_patient", False)
            self._waiting += not patient
            try:
                self._changed.wait_for(
                    lambda: len(self._busy) < self.limit and not (patient and self._waiting)
                )
            finally:
                self._waiting -= not patient
            worker = self._idle.pop() if self._idle else Worker(self.first.timeout)
            self._busy.append(worker)
            self._changed.notify_all()
        try:
            yield worker
        finally:
            with self._changed:
                self._busy.remove(worker)
                if self.allowed or worker is self.first:
                    self._idle.append(worker)
                else:
                    worker.close()
                self._changed.notify_all()

    def be_patient(self) -> None:
        """From now on this thread, which works ahead, gets a worker only while no other thread waits for one."""
        self._own.is_patient = True

    @property
    def limit(self) -> int:
        """The number of workers that may run at a time."""
        return max(self.allowed, default=1)

    @contextmanager
    def allow(self, count: int) -> Iterator[None]:
        """Let `count` workers run at a time. Several threads may allow some, and the most counts; when the last allowance has ended one worker is
        left, and the memory of the others is free."""
        with self._changed:
            self.allowed.append(count)
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self.allowed.remove(count)
                if not self.allowed:
                    for worker in self._idle:
                        if worker is not self.first:
                            worker.close()
                    self._idle = [worker for worker in self._idle if worker is self.first]

    def close_forks(self) -> None:
        """End those that are forks of this process, after what they verify now."""
        with self._changed:
            self._changed.wait_for(lambda: not any(worker.is_fork for worker in self._busy))
            for worker in self._idle:
                if worker.is_fork:
                    worker.close()


@cache
def shared_workers() -> Workers:
    """The verification processes of this process."""
    return Workers()


@contextmanager
def forked_workers() -> Iterator[None]:
    """In this block new verification processes are forks of this one as it is now, which need not import torch, where that is possible. None of them
    outlives it."""
    with forking(_prepare_forks):
        try:
            yield
        finally:
            shared_workers().close_forks()


def _failure(reason: str, judged: bool = True) -> dict[str, Any]:
    return {"ok": False, "error": None, "tolerance": None, "reason": reason, "judged": judged}


def _prepare_forks() -> Callable[[], None]:
    """What forks run. They have what is imported here: a new process needs most of it, too."""
    prepare_triton(device=False)
    answer = _prepare()
    return lambda: serve(lambda: answer)


def _prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
    from gristmill.autotune.group_timing import time_together
    from gristmill.autotune.verify import Verifier, verify

    registry, check = default_registry(), Verifier().verify
    if len(sys.argv) > 1:
        import torch

        from gristmill.kernels.collective.groups import rendezvous

        rank, world, kind, file = sys.argv[1:]
        torch.set_num_threads(1)
        rendezvous("workers", int(rank), int(world), kind, file, COLLECTIVE_SECONDS)
        check = verify  # without retries: all ranks must make the same calls

    def answer(task: dict[str, Any]) -> dict[str, Any]:
        op = registry.op(task["op"])
        kernel = registry.kernel(op.name, task["kernel"])
        arguments = (op, kernel, task["config"], op.problem(task["problem"]), task["device"])
        if task["rounds"]:
            try:
                times = time_together(*arguments, task["rounds"])
            except Exception as fault:
                return _failure(f"{type(fault).__name__}: {fault}")
            return {"ok": True, "judged": True, "reason": "", "times": times}
        try:
            outcome = check(*arguments)
        except UnverifiableError as fault:
            return _failure(str(fault), judged=False)
        error = outcome.error if outcome.error is None or outcome.error < float("inf") else None
        return {
            "ok": outcome.ok,
            "error": error,
            "tolerance": outcome.tolerance,
            "reason": outcome.reason,
            "judged": True,
        }

    return answer


if __name__ == "__main__":
    serve(_prepare)
