"""Programs in processes of their own that need not import torch: each is a fork of one process that has.

`run` is for what a program prints, writes and returns. What a program imports, how fast it starts, or how its
interpreter is started is asked of `subprocess.run`.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run(
    *command: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    path: Sequence[Path] = (),
) -> subprocess.CompletedProcess[str]:
    """Runs ``python COMMAND``, which starts with ``-m MODULE``, ``-c CODE`` or a file.

    env: its environment, that of this process by default. path: folders to import from first, also for its children.
    """
    folders = [*map(str, path), *filter(None, sys.path)]
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder, name) for name in ("out", "err"))
        request = {
            "command": command,
            "env": {**(os.environ if env is None else env), "PYTHONPATH": os.pathsep.join(folders)},
            "cwd": str(cwd or Path.cwd()),
            "path": folders,
            "out": str(out),
            "err": str(err),
        }
        server = _server()
        assert server.stdin is not None and server.stdout is not None
        try:
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            status = int(server.stdout.readline())
        except BaseException:  # such as a test's time-out: a late answer must not be that of the next program
            server.kill()
            _server.cache_clear()
            raise
        return subprocess.CompletedProcess(command, status, out.read_text(), err.read_text())


@cache
def _server() -> subprocess.Popen[str]:
    """The process that forks."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.forked"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    atexit.register(server.communicate)
    return server


def _become(request: dict[str, Any]) -> None:
    """Turns this fork into the program, and ends with it."""
    for descriptor, name in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
        file = os.open(name, os.O_RDWR | os.O_CREAT)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.path[:] = request["path"]
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


def main() -> None:
    """Answers every line of standard input, a request, with the exit status of its program."""
    import torch  # noqa: F401

    gc.freeze()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _become(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
