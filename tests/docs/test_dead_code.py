"""The search for dead code: what it finds, and what counts as used although nothing calls it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("vulture")
sys.path.insert(0, str(Path(__file__).parents[2] / "ci"))

import dead_code  # noqa: E402

SOURCE = """
TARGET = "gristmill.kernels.example:launch"
TEXT = "if not checked(x): raise error"

def launch(): ...
def checked(): ...
def faulty(): ...
def forgotten(): ...

class Box:
    def __init__(self, other):
        self.unread, other.setting = 1, TARGET + TEXT
"""
HOST = """
from gristmill.runtime import Engine
from host import Worker

class Ours(Worker):
    read_by_host: bool = True

    def called_by_host(self, given_by_host): ...

    async def awaited_by_host(self, given_to_it): ...

class Other(Engine):
    def called_by_nobody(self): ...

USES = Ours, Other
"""
TEST = """
import pytest

@pytest.mark.parametrize("fault", ["faulty"])
def test_it(fault): ...

def helper(): ...
"""


def test_unused_definitions_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dead_code.repository, "ROOT", tmp_path)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "kernels" / "example.py").write_text(SOURCE)
    (tmp_path / "integrations").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(TEST)
    (tmp_path / "integrations" / "host.py").write_text(HOST)
    assert dead_code.main() == 1
    actual = [line.partition(": unused ")[2] for line in capsys.readouterr().out.splitlines()]
    assert sorted(actual) == [
        "attribute unread",
        "class Box",
        "function forgotten",
        "function helper",
        "method called_by_nobody",
        "variable USES",
    ]
