"""Forks behave as new processes do: output, status, environment, folder, path, what is done at the end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.forked import run


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('so')", 1, "so\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
    ],
)
def test_the_end_is_that_of_a_program(code: str, status: int, error: str) -> None:
    process = run("-c", f"print('out', flush=True); {code}")
    assert (process.returncode, process.stdout, process.stderr) == (status, "out\n", error)


def test_an_exception_is_printed() -> None:
    process = run("-c", "1 / 0")
    assert process.returncode == 1 and process.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_exit_functions_run_and_threads_end_first() -> None:
    code = (
        "import atexit, threading, time; atexit.register(print, 'last')\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start(); print('first')"
    )
    assert run("-c", code).stdout.split() == ["first", "thread", "last"]


def test_each_has_its_own_environment_folder_and_modules(tmp_path: Path) -> None:
    (tmp_path / "gm_forked.py").write_text("import os; print(os.environ['GM_X'], os.getcwd())\n")
    for value in ("1", "2"):
        environment = {"GM_X": value}
        process = run("-m", "gm_forked", env=environment, cwd=tmp_path, path=(tmp_path,))
        assert process.stdout.split() == [value, os.path.realpath(tmp_path)], process.stderr
    code = "import subprocess, sys; print(subprocess.run([sys.executable, '-m', 'gm_forked']).returncode)"
    child = run("-c", code, env={"GM_X": "3"}, path=(tmp_path,))
    assert child.stdout.split()[0] == "3", "children import from the same folders"
    assert "gm_forked" not in run("-c", "import sys; print(*sys.modules)").stdout
    assert run("-m", "gm_forked", env={"GM_X": "4"}).returncode == 1


def test_a_program_that_is_interrupted_leaves_the_next_one_its_own_answer() -> None:
    previous = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("interrupted"))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(pytest.fail.Exception, match="interrupted"):
            run("-c", "import time; time.sleep(1); raise SystemExit(5)")
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert run("-c", "print(7)").stdout == "7\n"


def test_nothing_but_torch_is_imported_beforehand() -> None:
    modules = run("-c", "import sys; print(*sys.modules)").stdout.split()
    assert "torch" in modules and not {"triton", "transformers", "gristmill.ops"} & {*modules}
