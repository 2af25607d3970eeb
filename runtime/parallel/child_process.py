"""Processes that serve messages of this one on a pipe, and end with it, whatever they do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection


@dataclass(frozen=True)
class Failure:
    """The exception that ended a process, and when: `at` is by time.monotonic, which all processes of a host share."""

    error: Exception | None
    text: str
    at: float


@dataclass
class ChildProcess:
    """A process as its parent sees it.

    Attributes:
        life: the descriptor whose closing ends the process.
        failure: its last message, if it failed.
    """

    number: int
    process: subprocess.Popen[bytes]
    sentinel: int
    connection: Connection
    life: int
    failure: Failure | None = None

    def end(self) -> None:
        """Kill it and give back its descriptors."""
        self.process.kill()
        self.process.wait()
        self.connection.close()
        os.close(self.sentinel)
        os.close(self.life)


def spawn(
    module: str, number: int, descriptors: Sequence[int] = (), env: Mapping[str, str] | None = None
) -> ChildProcess:
    """Start ``python -m MODULE``, which calls `serve`. It inherits `descriptors`; `env` is added to this process's environment."""
    here, there = Pipe()
    read, write = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(there.fileno()), str(read)],
            stdin=subprocess.DEVNULL,
            stdout=2,  # the standard output is the program's
            pass_fds=(there.fileno(), read, *descriptors),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(env or {})},
            process_group=0,
        )
    except BaseException:
        here.close()
        os.close(write)
        raise
    finally:
        there.close()
        os.close(read)
    return ChildProcess(number, process, os.pidfd_open(process.pid), here, write)


def end_all(processes: Iterable[ChildProcess]) -> None:
    """Kill processes."""
    processes = list(processes)
    for process in processes:
        process.process.kill()  # all at once, so that none reports that another is gone
    for process in processes:
        process.end()


def status(code: int) -> str:
    """How a process ended, by its exit code."""
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def serve(answer: Callable[[Connection], None]) -> None:
    """The main function of a process: answer(connection) until it returns or fails, with a `Failure` as the last message."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its children
    descriptor, life = map(int, sys.argv[1:])
    threading.Thread(target=_end_with, args=(life,), daemon=True).start()
    connection = Connection(descriptor)
    try:
        answer(connection)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(1)  # the parent has ended
    except Exception as error:
        text, at = traceback.format_exc(), time.monotonic()
        try:
            connection.send(Failure(error, text, at))
        except (TypeError, ValueError, AttributeError):  # an exception that cannot be pickled
            connection.send(Failure(None, text, at))
        os._exit(1)  # threads may wait for a device or for peers, so no orderly end is possible
    os._exit(0)


def _end_with(descriptor: int) -> None:
    """End this process when the parent's end of the pipe is closed, whatever the main thread waits for."""
    os.read(descriptor, 1)
    os._exit(1)
