"""Forked children are what children of the runtime are otherwise: their descriptors, environment, groups and ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gristmill.runtime.parallel import child_process
from tests.forked import forked_children

CHILD = """
import os
from gristmill.runtime.parallel.child_process import serve

def answer(connection):
    while (asked := connection.recv()) != "end":
        if asked == "fail":
            raise ValueError("as asked")
        connection.send(eval(asked))

if __name__ == "__main__":
    serve(answer)
"""


@pytest.fixture(params=["forked", "started"])
def spawn(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts CHILD, as a fork and as users have it: both must do the same."""
    (tmp_path / "gm_child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(str(tmp_path))
    started: list[child_process.ChildProcess] = []

    def start(*arguments: Any, **options: Any) -> child_process.ChildProcess:
        started.append(child_process.spawn("gm_child", 3, *arguments, **options))
        return started[-1]

    if request.param == "forked":
        with forked_children():
            yield start
            child_process.end_all(started)
    else:
        yield start
        child_process.end_all(started)


Spawn = Callable[..., child_process.ChildProcess]


def ask(child: child_process.ChildProcess, text: str) -> Any:
    child.connection.send(text)
    assert child.connection.poll(30), "no answer"
    return child.connection.recv()


def test_what_a_child_has(spawn: Spawn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GM_FROM_PARENT", "a")
    monkeypatch.chdir(tmp_path)
    read, write = os.pipe()
    child = spawn([write], env={"GM_GIVEN": "b"})
    os.close(write)
    assert ask(child, "os.getpid()") == child.process.pid == ask(child, "os.getpgid(0)")
    assert ask(child, "[os.environ.get(n) for n in ('GM_FROM_PARENT', 'GM_GIVEN')]") == ["a", "b"]
    assert ask(child, "os.getcwd()") == str(tmp_path)
    assert ask(child, f"os.write({write}, b'here')") == 4 and os.read(read, 9) == b"here"
    assert ask(child, "os.read(0, 1)") == b""
    assert child.process.poll() is None
    child.process.kill()
    assert child.process.wait(30) == -signal.SIGKILL
    assert os.read(read, 1) == b"", "the descriptor is open elsewhere"
    os.close(read)


def test_how_a_child_ends(spawn: Spawn) -> None:
    ends, fails, killed = spawn(), spawn(), spawn()
    ends.connection.send("end")
    fails.connection.send("fail")
    os.kill(killed.process.pid, signal.SIGTERM)
    assert [one.process.wait(30) for one in (ends, fails, killed)] == [0, 1, -signal.SIGTERM]
    failure = fails.connection.recv()
    assert isinstance(failure.error, ValueError) and "as asked" in failure.text
    for one in (ends, fails, killed):
        with pytest.raises(ProcessLookupError):
            os.kill(one.process.pid, 0)


def test_a_child_ends_with_its_parent(spawn: Spawn) -> None:
    child = spawn()
    assert ask(child, "1") == 1
    life, child.life = child.life, os.open(os.devnull, os.O_RDONLY)
    os.close(life)
    assert child.process.wait(30) == 1
