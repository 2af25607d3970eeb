"""No garbage collection runs during a capture. Its effect on a capture is tested in
tests/gpu/test_captures_gpu.py."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gristmill.autotune.captures import capturing, capturing_pieces


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The arguments of each capture, and whether garbage collection was enabled during it."""
    captures: list[Any] = []

    @contextlib.contextmanager
    def capture(graph: Any, **options: Any) -> Iterator[None]:
        captures.append((graph, options, gc.isenabled()))
        yield

    monkeypatch.setattr(torch.cuda, "graph", capture)
    assert gc.isenabled()
    yield captures
    gc.enable()


def test_nothing_is_collected_meanwhile(seen: list[Any]) -> None:
    with capturing("graph", stream=3):  # type: ignore[arg-type]
        assert not gc.isenabled()
    assert seen == [("graph", {"stream": 3}, False)] and gc.isenabled()


def test_collection_goes_on_after_an_error(seen: list[Any]) -> None:
    with pytest.raises(RuntimeError, match="no kernel"), capturing("graph"):  # type: ignore[arg-type]
        raise RuntimeError("no kernel")
    assert gc.isenabled()


def test_who_had_collection_off_keeps_it_off(seen: list[Any]) -> None:
    gc.disable()
    with capturing("graph"):  # type: ignore[arg-type]
        pass
    assert not gc.isenabled()


class Piece:
    """A graph whose captures are noted; one of them may fail to end."""

    noted: list[str]
    fails: int | None

    def __init__(self) -> None:
        self.number = sum(text.startswith("begin") for text in self.noted)

    def capture_begin(self, pool: int) -> None:
        self.noted.append(f"begin {self.number} in {pool}, {'not ' * gc.isenabled()}without collections")

    def capture_end(self) -> None:
        self.noted.append(f"end {self.number}")
        if self.number == self.fails:
            raise RuntimeError("planted")


@pytest.mark.parametrize("fails", [None, 0, 1])
@pytest.mark.parametrize("fault", [False, True], ids=["", "the block fails"])
def test_pieces_end_once_each(fails: int | None, fault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Piece, "noted", [], raising=False)
    monkeypatch.setattr(Piece, "fails", fails, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Piece)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    begins = [f"begin {number} in 7, without collections" for number in range(2)]
    ok = fails is None and not fault
    with contextlib.nullcontext() if ok else pytest.raises((RuntimeError, KeyError)):
        with capturing_pieces(3, pool=7) as pieces:  # type: ignore[arg-type]
            pieces.cut()
            if fault:
                raise KeyError
        assert [graph.number for graph in pieces.graphs] == [0, 1]  # type: ignore[attr-defined]
    expected = [begins[0], "end 0", begins[1], "end 1"]
    assert Piece.noted == (expected[:2] if fails == 0 else expected) and gc.isenabled()
