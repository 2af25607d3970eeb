"""Verification in a child process: a fault kills the child, not the caller, and is recorded.

The parent writes one JSON task per line and reads one JSON outcome per line. Run as ``python -m gristmill.autotune.worker``; with the
arguments RANK, WORLD, cpu or cuda, and a file for the rendezvous it is one rank of a worker group, which verifies collective operations together.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import IO, Any

from gristmill.autotune.errors import UnverifiableError
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry

TIMEOUT = 600.0
"""Seconds one verification may take, compilation included."""
COLLECTIVE_SECONDS = 60.0
"""Seconds that a rank of a worker group waits for the others in one collective call."""


class Worker:
    """A child process that verifies. Started at the first task, replaced when it dies. arguments: of its command line."""

    def __init__(self, timeout: float = TIMEOUT, arguments: Sequence[str] = ()) -> None:
        self.timeout = timeout
        self.arguments = tuple(arguments)
        self._process: subprocess.Popen[str] | None = None
        self._outcomes: queue.Queue[str | None] = queue.Queue()

    def verify(self, op: Op, kernel: Kernel, config: Config, problem: Problem, device: str) -> dict[str, Any]:
        """The outcome as a table (ok, error, tolerance, reason, judged); a dead or silent child is an outcome too.

        judged: False if the fault is not the kernel's, so that there is no verdict on it.
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
        process = self._alive()
        task = {
            "op": op.name,
            "kernel": kernel.name,
            "config": dict(config),
            "problem": str(problem),
            "device": device,
            "rounds": rounds,
        }
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it died; the end of its output says so
        except BaseException:
            self.close()
            raise

    def receive(self) -> dict[str, Any]:
        """The outcome of the verification that was started last."""
        process = self._process
        assert process is not None
        try:
            line = self._outcomes.get(timeout=self.timeout)
        except queue.Empty:
            self.close()
            return _failure(f"verification: no answer in {self.timeout:.0f} s")
        except BaseException:
            self.close()  # a late outcome must not be attributed to the next task
            raise
        if line is None:
            code = process.wait()
            self._process = None
            return _failure(f"killed its process (exit status {code})")
        outcome: dict[str, Any] = json.loads(line)
        return outcome

    @property
    def is_alive(self) -> bool:
        """Whether its child runs."""
        return self._process is not None and self._process.poll() is None

    def close(self) -> None:
        """End the child."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _alive(self) -> subprocess.Popen[str]:
        if self._process is None or not self.is_alive:
            self._outcomes = queue.Queue()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gristmill.autotune.worker", *self.arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                process_group=0,  # an interrupt from the keyboard is for the parent, which ends its children
            )
            threading.Thread(target=_pump, args=(self._process.stdout, self._outcomes), daemon=True).start()
        return self._process


class Workers:
    """Verification processes for the threads of this process: one, but while `allow` lets more run at a time."""

    def __init__(self, first: Worker | None = None) -> None:
        self.first = first or Worker()
        self._idle = [self.first]
        self._limit = 1
        self._busy = 0
        self._changed = threading.Condition()

    @contextmanager
    def one(self) -> Iterator[Worker]:
        """A worker for one thread; waits while as many as are allowed are busy."""
        with self._changed:
            self._changed.wait_for(lambda: self._busy < self._limit)
            self._busy += 1
            worker = self._idle.pop() if self._idle else Worker(self.first.timeout)
        try:
            yield worker
        finally:
            with self._changed:
                self._busy -= 1
                if self._limit > 1 or worker is self.first:
                    self._idle.append(worker)
                else:
                    worker.close()
                self._changed.notify_all()

    @contextmanager
    def allow(self, count: int) -> Iterator[None]:
        """Let `count` workers run at a time; afterwards one is left, and the memory of the others is free."""
        with self._changed:
            self._limit = count
            self._changed.notify_all()
        try:
            yield
        finally:
            self.only_one()

    def only_one(self) -> None:
        """From now on one trial at a time."""
        with self._changed:
            self._limit = 1
            for worker in self._idle:
                if worker is not self.first:
                    worker.close()
            self._idle = [worker for worker in self._idle if worker is self.first]


@cache
def shared_workers() -> Workers:
    """The verification processes of this process."""
    return Workers()


def _failure(reason: str, judged: bool = True) -> dict[str, Any]:
    return {"ok": False, "error": None, "tolerance": None, "reason": reason, "judged": judged}


def _pump(stream: IO[str], outcomes: queue.Queue[str | None]) -> None:
    for line in stream:
        outcomes.put(line)
    outcomes.put(None)


def main() -> None:
    """Answer tasks from standard input until it closes."""
    from gristmill.autotune.group_timing import time_together
    from gristmill.autotune.verify import Verifier, verify

    # Kernels and libraries may print; the pipe to the parent carries outcomes only.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    registry, check = default_registry(), Verifier().verify
    if len(sys.argv) > 1:
        import torch

        from gristmill.kernels.collective.groups import rendezvous

        rank, world, kind, file = sys.argv[1:]
        torch.set_num_threads(1)
        rendezvous("workers", int(rank), int(world), kind, file, COLLECTIVE_SECONDS)
        check = verify  # without retries: all ranks must make the same calls
    for line in sys.stdin:
        task = json.loads(line)
        op = registry.op(task["op"])
        kernel = registry.kernel(op.name, task["kernel"])
        try:
            if task["rounds"]:
                times = time_together(
                    op, kernel, task["config"], op.problem(task["problem"]), task["device"], task["rounds"]
                )
                output.write(json.dumps({"ok": True, "judged": True, "reason": "", "times": times}) + "\n")
                output.flush()
                continue
            outcome = check(op, kernel, task["config"], op.problem(task["problem"]), task["device"])
            error = outcome.error if outcome.error is None or outcome.error < float("inf") else None
            message = {
                "ok": outcome.ok,
                "error": error,
                "tolerance": outcome.tolerance,
                "reason": outcome.reason,
                "judged": True,
            }
        except UnverifiableError as fault:
            message = _failure(str(fault), judged=False)
        except Exception as fault:
            if not task["rounds"]:
                raise
            message = _failure(f"{type(fault).__name__}: {fault}")
        output.write(json.dumps(message) + "\n")
        output.flush()


if __name__ == "__main__":
    main()
