"""A child process that answers each line of JSON with a line of JSON."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO, Any

from gristmill.autotune.forks import Fork


class Child:
    """A child process of this Python. Started at the first task, replaced when it has died.

    Args:
        arguments: those of Python, as ("-m", "module").
        timeout: seconds that one answer may take.
        stderr: as of `subprocess.Popen`.
    """

    def __init__(self, arguments: Sequence[str], timeout: float, stderr: int | None = None) -> None:
        self.timeout = timeout
        self._command = [sys.executable, *arguments]
        self._stderr = stderr
        self._process: subprocess.Popen[str] | Fork | None = None
        self._answers: queue.Queue[str | None] = queue.Queue()

    def write(self, task: Any) -> None:
        """Start a task; `read` returns the answer."""
        process = self._alive()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it died; the end of its output says so
        except BaseException:
            self.close()
            raise

    def read(self) -> Any:
        """The answer to the task that was started last.

        Raises:
            TimeoutError: there is none in time. The child is ended.
            ChildProcessError: the child has died; the message is its exit status.
        """
        process = self._process
        assert process is not None
        try:
            line = self._answers.get(timeout=self.timeout)
        except queue.Empty:
            self.close()
            raise TimeoutError(f"no answer in {self.timeout:.0f} s") from None
        except BaseException:
            self.close()  # a late answer must not be attributed to the next task
            raise
        if line is None:
            code = process.wait()
            self._process = None
            raise ChildProcessError(f"exit status {code}")
        return json.loads(line)

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def is_fork(self) -> bool:
        """Whether the process runs as a fork of this one (`gristmill.autotune.forks`)."""
        return isinstance(self._process, Fork)

    def start(self) -> subprocess.Popen[str] | Fork:
        """A new process."""
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            process_group=0,  # an interrupt from the keyboard is for the parent, which ends its children
        )

    def _alive(self) -> subprocess.Popen[str] | Fork:
        if self._process is None or not self.is_alive:
            self._answers = queue.Queue()
            self._process = self.start()
            threading.Thread(target=_pump, args=(self._process.stdout, self._answers), daemon=True).start()
        return self._process


def _pump(stream: IO[str], answers: queue.Queue[str | None]) -> None:
    for line in stream:
        answers.put(line)
    answers.put(None)


def serve(prepare: Callable[[], Callable[[Any], Any]]) -> None:
    """Be the child: answer the tasks of standard input with the function that `prepare` returns, until it closes.

    Kernels and libraries may print; what they print goes to standard error.
    """
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer = prepare()
    for line in sys.stdin:
        text = json.dumps(answer(json.loads(line)))
        try:
            output.write(text + "\n")
            output.flush()
        except BrokenPipeError:
            os._exit(1)  # the parent was killed: a traceback would only follow it on its terminal
