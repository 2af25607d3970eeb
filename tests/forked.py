"""Programs in processes of their own that need not import torch: each is a fork of one process that has.

`run` is for what a program prints, writes and returns; within `forked_children`, children of the runtime (ranks and replicas) are such
forks too, of a process that has imported the runtime, and so are their own children and those that verify kernels for them. What a program
imports, how fast it starts, or how its interpreter is started is asked of `subprocess.run`.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import json
import math
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
FREE = 1000
"""Descriptors from here on are in nobody's way while a fork arranges its own."""
RUNTIME = "gristmill.runtime.llm"
"""What ranks and replicas import before anything else. It starts no thread and does not import Triton, whose interpreter the environment
of a fork chooses."""
TORCH = "torch.distributed"
_asked: socket.socket | None = None
"""In a fork: where it asks the process that forked it for others."""


def run(
    *command: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    path: Sequence[Path] = (),
    imported: str = TORCH,
    workers: bool = False,
    given: str = "",
) -> subprocess.CompletedProcess[str]:
    """Runs ``python COMMAND``, which starts with ``-m MODULE``, ``-c CODE`` or a file.

    env: its environment, that of this process by default. path: folders to import from first, also for its children. imported: as of
    `Process`; with `RUNTIME`, the children of the program are forks too. workers: those that verify kernels for it are; a sitecustomize.py
    is nothing to them. given: what it reads from its standard input, then a pipe.
    """
    folders = os.pathsep.join([*map(str, path), *filter(None, sys.path)])
    environment = {**(os.environ if env is None else env), "PYTHONPATH": folders}
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder, name) for name in ("out", "err"))
        with out.open("wb") as to, err.open("wb") as errors:
            descriptors = {1: to.fileno(), 2: errors.fileno()} | ({0: _pipe_of(given)} if given else {})
            process = Process(command, descriptors, environment, cwd, imported=imported, workers=workers)
            if given:
                os.close(descriptors[0])
        try:
            status = process.wait()
        except BaseException:  # such as a test's time-out
            process.kill()
            process.wait()
            raise
        return subprocess.CompletedProcess(command, status, out.read_text(), err.read_text())


def _pipe_of(text: str) -> int:
    """The end to read of a pipe that holds a text, which must be short enough for it."""
    end, to_it = os.pipe()
    with os.fdopen(to_it, "w") as file:
        file.write(text)
    return end


@contextmanager
def forked_children() -> Iterator[None]:
    """Children of the runtime (`child_process.spawn`) are forks within this context."""
    from gristmill.runtime.parallel import child_process

    with patch.object(child_process, "subprocess", SimpleNamespace(Popen=_child, DEVNULL=subprocess.DEVNULL)):
        yield


@contextmanager
def forked_workers() -> Iterator[None]:
    """Processes that verify kernels (`gristmill.autotune.worker`) are forks within this context."""
    from gristmill.autotune import child

    with patch.object(child, "subprocess", SimpleNamespace(Popen=_Popen, PIPE=subprocess.PIPE)):
        yield


def _child(
    command: Sequence[str],
    *,
    stdin: int,
    stdout: int,
    pass_fds: Sequence[int],
    env: Mapping[str, str],
    process_group: int,
) -> Process:
    """What `child_process` asks of `subprocess.Popen`."""
    assert (command[0], stdin, process_group) == (sys.executable, subprocess.DEVNULL, 0)
    descriptors = {1: stdout, 2: 2} | {one: one for one in pass_fds}
    return Process(command[1:], descriptors, env, own_group=True, imported=RUNTIME)


class _Popen(subprocess.Popen[Any]):
    """`subprocess.Popen`, but for workers of `gristmill.autotune.worker`: in a fork, and within `forked_workers`."""

    def __new__(cls, command: Any, *rest: Any, **options: Any) -> Any:
        if command[:3] != [sys.executable, "-m", "gristmill.autotune.worker"]:
            return super().__new__(cls)
        asked = [options[name] for name in ("stdin", "stdout", "stderr", "text", "process_group")]
        assert asked == [subprocess.PIPE, subprocess.PIPE, None, True, 0] and not rest
        return start(command[1:], options["env"])


def start(command: Sequence[str], env: Mapping[str, str]) -> Process:
    """``python COMMAND`` as a fork of a process that has imported the runtime, or, in a fork, of what it is one of: in a group of its own, with
    pipes to its standard input and from its output. `env` as of `Process`."""
    given, to_it = os.pipe()
    from_it, printed = os.pipe()
    process = Process(command, {0: given, 1: printed, 2: 2}, env, own_group=True, imported=RUNTIME)
    _close((given, printed))
    process.stdin, process.stdout = os.fdopen(to_it, "w"), os.fdopen(from_it)
    return process


class Process:
    """``python COMMAND`` as a fork, with the interface of `subprocess.Popen`.

    descriptors: its descriptors, each with the one of this process that it is; its standard input is empty if it is not among them. env: its
    environment, whose PYTHONPATH is all that it imports from. own_group: it is in a process group of its own. imported: a module that the
    forked process has. workers: as of `run`.
    """

    stdin: IO[str] | None = None
    stdout: IO[str] | None = None

    def __init__(
        self,
        command: Sequence[str],
        descriptors: Mapping[int, int],
        env: Mapping[str, str],
        cwd: Path | None = None,
        own_group: bool = False,
        imported: str = TORCH,
        workers: bool = False,
    ) -> None:
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self._status, theirs = socket.socketpair()
        request = {
            "command": command,
            "numbers": [*descriptors],
            "env": dict(env),
            "cwd": str(cwd or Path.cwd()),
            "own_group": own_group,
            "workers": workers or imported == RUNTIME,
        }
        server = _asked or _server(imported)
        # One packet, since other processes may ask at the same time.
        socket.send_fds(server, [json.dumps(request).encode()], [theirs.fileno(), *descriptors.values()])
        theirs.close()
        self.pid = int.from_bytes(_exactly(self._status, 4), "little")

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None and select.select([self._status], [], [], 0)[0]:
                self.returncode = int.from_bytes(_exactly(self._status, 4), "little", signed=True)
                self._status.shutdown(socket.SHUT_WR)
                self._status.recv(1)  # until the server has forgotten the process
                self._status.close()
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (math.inf if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


@cache
def _server(imported: str) -> socket.socket:
    """The process that forks and has imported a module; it ends with this process, or when this end of its socket is shut down."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.forked",
            *map(str, (os.getpid(), theirs.fileno(), ours.fileno())),
            imported,
        ],
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno(), ours.fileno()],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        process_group=0,
    )
    theirs.close()

    def end() -> None:
        ours.shutdown(socket.SHUT_RDWR)
        ours.close()
        server.wait()

    atexit.register(end)
    return ours


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError("the process that forks has ended")
        data += part
    return data


def _become(request: dict[str, Any], descriptors: Sequence[int], ask: int) -> None:
    """Turns this fork into the program, and ends with it. `ask`: where it can ask for other forks."""
    global _asked
    if request["own_group"]:
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    aside = [fcntl.fcntl(one, fcntl.F_DUPFD, FREE) for one in descriptors]
    null = fcntl.fcntl(os.open(os.devnull, os.O_RDONLY), fcntl.F_DUPFD, FREE)
    ask = fcntl.fcntl(ask, fcntl.F_DUPFD_CLOEXEC, FREE)
    os.closerange(0, FREE)
    for one, number in zip((null, *aside), (0, *request["numbers"]), strict=True):
        os.dup2(one, number)
        os.close(one)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.path[:] = request["env"]["PYTHONPATH"].split(os.pathsep)
    _asked = socket.socket(fileno=ask)
    if request["workers"]:
        subprocess.__dict__["Popen"] = _Popen
    if RUNTIME in sys.modules:
        from gristmill.runtime.parallel import child_process

        child_process.__dict__["subprocess"] = SimpleNamespace(Popen=_child, DEVNULL=subprocess.DEVNULL)
    status = 0
    try:
        _execute(*request["command"])
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    # As an interpreter ends, but for the modules: to free those of torch takes half a second.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _execute(kind: str, *rest: str) -> None:
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        sys.argv = [*rest]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *rest]
        runpy.run_path(kind, run_name="__main__")


def _serve(parent: int, requests: socket.socket, ask: int) -> None:
    """Forks for each request, and tells its status connection the id of the process and then how it ended; until `parent` has ended.

    A process is a zombie until nobody holds the other end of its connection, as one of `subprocess.Popen` is until it is waited for.
    """
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    selector.register(end := os.pidfd_open(parent), selectors.EVENT_READ)
    processes: dict[socket.socket, int] = {}
    while True:
        for key, _ in selector.select():
            if key.fd == end or key.fileobj is requests:
                text, descriptors = (b"", []) if key.fd == end else _packet(requests)
                if not text:
                    for pid in processes.values():
                        _reap(pid)
                    return
                request = json.loads(text)
                status = socket.socket(fileno=descriptors[0])
                pid = os.fork()
                if pid == 0:
                    _become(request, descriptors[1:], ask)
                _close(descriptors[1:])
                processes[status] = pid
                selector.register(status, selectors.EVENT_READ)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, status)
                status.sendall(pid.to_bytes(4, "little"))
            elif isinstance(key.fileobj, socket.socket):  # nobody asks for this process any more
                selector.unregister(key.fileobj)
                _reap(processes.pop(key.fileobj))
                key.fileobj.close()
            else:
                status = key.data
                selector.unregister(key.fileobj)
                _close([key.fd])
                if status in processes:
                    with suppress(BrokenPipeError):  # the event of its end follows
                        status.sendall(_exit_code(processes[status]).to_bytes(4, "little", signed=True))


def _packet(requests: socket.socket) -> tuple[bytes, list[int]]:
    """The next request, with its descriptors; empty when there will be none."""
    text, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 64)
    return text, descriptors


def _exit_code(pid: int) -> int:
    """The exit code of a zombie, which stays one."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _reap(pid: int) -> None:
    """Forgets a process; one that nobody can end any more is killed."""
    if os.waitpid(pid, os.WNOHANG)[0] == 0:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _close(descriptors: Iterable[int]) -> None:
    for one in descriptors:
        os.close(one)


def main() -> None:
    parent, requests, ask = map(int, sys.argv[1:4])
    importlib.import_module(TORCH)
    importlib.import_module(sys.argv[4])
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which end their processes
    _serve(parent, socket.socket(fileno=requests), ask)


if __name__ == "__main__":
    main()
