"""Worker processes as forks of this process as it is before it uses a device: they need not import torch, which takes seconds.

A process that has used a device cannot fork another one that does. `forking` therefore forks one process early, which uses no device and forks
workers when it is asked to. It refuses where a fork might not be like a new process: beside other threads, whose locks nobody would release, and
with settings of torch that a program has changed, which would be those of verifications. Whether the driver works in a fork shows in the fork
itself, which says so before its first task; nothing else in a process tells whether a library has initialized the driver. The caller then starts a
new process, as without this module.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, TextIO

MOST_BYTES = 1 << 20
"""The longest message: an environment."""
READY_SECONDS = 60.0
"""Time that a fork may take until it has initialized the driver of its device."""
DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd")
"""Those of NVIDIA's and AMD's drivers. Without them there is no device that takes long to reach."""
Prepare = Callable[[], Callable[[], None]]
"""Imports what forks need, and returns what they run."""
LOST = 255
"""The exit code of a fork of a server that has ended."""
_READY, _UNUSABLE = b"+", b"-"
_current: ForkServer | None = None


class Fork:
    """A forked process, with what `Child` uses of `subprocess.Popen`: pipes to its standard input and from its output."""

    def __init__(self, server: ForkServer, pid: int, stdin: TextIO, stdout: TextIO) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.exit_code(self.pid)
        return self.returncode

    def wait(self) -> int:
        """Wait until it has ended; its exit code."""
        while (code := self.poll()) is None:
            time.sleep(0.002)
        return code

    def kill(self) -> None:
        """End it."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """A fork of this process that forks others, which run what `prepare` returns. It, and all of them, end with this process or with `close`."""

    def __init__(self, prepare: Prepare) -> None:
        self._lock = threading.Lock()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Python 3.12 counts threads of libraries, which a fork does without: those of a BLAS are made again.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            _alone(theirs.fileno())
            _serve(theirs, prepare)
        theirs.close()
        self._connection: socket.socket | None = ours

    def fork(self) -> Fork | None:
        """A new fork, whose driver works, with the environment of this process; None if there can be none, and then none later."""
        stdin, to_it = os.pipe()
        from_it, stdout = os.pipe()
        process = None
        with os.fdopen(stdin), os.fdopen(stdout, "w"), contextlib.suppress(EOFError):
            pid = self._ask(dict(os.environ), stdin, stdout)
            assert pid is not None
            process = Fork(self, pid, os.fdopen(to_it, "w"), os.fdopen(from_it))
        if process is None:
            os.close(to_it)
            os.close(from_it)
            self.close()
            return None
        ready, _, _ = select.select([from_it], [], [], READY_SECONDS)
        if ready and os.read(from_it, 1) == _READY:
            return process
        process.kill()
        process.wait()
        self.close()
        return None

    def exit_code(self, pid: int) -> int | None:
        """That of a fork; None while it runs, and `LOST` if nobody knows it any more."""
        try:
            return self._ask(pid)
        except EOFError:  # the server has been killed
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return LOST
            return None

    def close(self) -> None:
        """End the server and all its forks."""
        with self._lock:
            if self._connection is None:
                return
            self._connection.close()
            self._connection = None
        os.waitpid(self._pid, 0)

    def _ask(self, message: object, *descriptors: int) -> int | None:
        """The answer of the server; EOFError if it has ended."""
        data = json.dumps(message).encode()
        with self._lock:
            if self._connection is None:
                raise EOFError
            try:
                if descriptors:
                    socket.send_fds(self._connection, [data], descriptors)
                else:
                    self._connection.send(data)
                text = self._connection.recv(64)
            except OSError:
                raise EOFError from None
        if not text:
            raise EOFError
        answer: int | None = json.loads(text)
        return answer


@contextlib.contextmanager
def forking(prepare: Prepare) -> Iterator[None]:
    """In this block `fork` returns forks of this process as it is now, if it may be forked. `prepare` is called once, in a fork that uses no device:
    what it imports they have, and what it returns they run."""
    global _current
    if _current is not None or why_not():
        yield
        return
    server = _current = ForkServer(prepare)
    try:
        yield
    finally:
        _current = None
        server.close()


def fork() -> Fork | None:
    """A fork, if one can be made now."""
    return None if _current is None else _current.fork()


def has_device() -> bool:
    """Whether this machine may have a device whose driver takes long to reach; asks no driver."""
    return any(Path(file).exists() for file in DEVICE_FILES)


def why_not() -> str:
    """Why this process is not forked; "" if it may be."""
    if not hasattr(os, "fork") or not hasattr(socket, "send_fds"):
        return "this system does not fork"
    if not has_device():
        return "there is no device that takes long to reach"
    if threading.active_count() > 1:
        return "other threads run"
    return _not_as_new()


def _not_as_new() -> str:
    """Why a fork would not verify as a new process does; "" if it would."""
    import torch
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    if torch.cuda.is_initialized():
        return "this process uses a device"
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # set by another interface
        precision = ""
    as_new = (
        torch.get_default_dtype() is torch.float32,
        torch.get_default_device() == torch.device("cpu"),
        precision == "highest",
        not torch.are_deterministic_algorithms_enabled(),
        not torch.is_inference_mode_enabled(),
        _get_current_dispatch_mode() is None,
    )
    return "" if all(as_new) else "the program has changed settings of torch"


def _alone(keep: int) -> None:
    """Make a fork independent of the process that it comes from, whose files it leaves alone but for standard error and one descriptor."""
    gc.disable()
    gc.freeze()  # nothing that the other process has made may be finalized here
    os.setpgid(0, 0)  # an interrupt from the keyboard is for the parent
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    os.dup2(2, 1)
    sys.argv = sys.argv[:1]
    # Another file takes the place of each, so that an object that closes its descriptor later closes nothing of this process's own.
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in (1, 2, keep, null):
            with contextlib.suppress(OSError):  # that of the listing is closed
                os.fstat(descriptor)
                os.dup2(null, descriptor, inheritable=False)


def _serve(connection: socket.socket, prepare: Prepare) -> NoReturn:
    """Fork for each environment, and answer with the process's id; answer an id with the exit code of that fork."""
    forks: set[int] = set()
    try:
        main = prepare()
        while True:
            text, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, 2)
            if not text:
                break
            message = json.loads(text)
            if descriptors:
                answer: int | None = os.fork()
                if answer == 0:
                    _become(descriptors, message, connection, main)
                assert answer is not None
                forks.add(answer)
                for descriptor in descriptors:
                    os.close(descriptor)
            else:
                answer = _exit_code(message, forks)
            connection.send(json.dumps(answer).encode())
    except BaseException:
        traceback.print_exc()
    for pid in forks:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _exit_code(pid: int, forks: set[int]) -> int | None:
    """The exit code of a fork that has ended, which is then forgotten; None while it runs."""
    if pid not in forks:
        return LOST
    ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        return None
    forks.remove(pid)
    return os.waitstatus_to_exitcode(status)


def _become(
    descriptors: list[int], environment: dict[str, str], server: socket.socket, main: Callable[[], None]
) -> NoReturn:
    """Be a worker: say whether the driver works here, then run `main` with these two as standard input and output."""
    status = 1
    try:
        server.close()
        os.setpgid(0, 0)
        for descriptor, number in zip(descriptors, (0, 1), strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        # New ones, since those of the parent may hold what it has not written yet.
        sys.stdin, sys.stdout, sys.stderr = (
            open(number, mode, closefd=False)  # noqa: SIM115  # as long as this process
            for number, mode in ((0, "r"), (1, "w"), (2, "w"))
        )
        os.environ.clear()
        os.environ.update(environment)
        usable = _driver_works()
        os.write(1, _READY if usable else _UNUSABLE)
        if usable:
            gc.enable()
            main()
            status = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


def _driver_works() -> bool:
    """Whether this fork can use devices. Torch's operations on the CPU get one thread: a fork does not have those of its parent."""
    import torch

    torch.set_num_threads(1)
    try:
        torch.cuda.init()
    except Exception:
        return False
    return True
