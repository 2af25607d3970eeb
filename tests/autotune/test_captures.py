"""No garbage collection runs during a capture. Its effect on a capture is tested in
tests/gpu/test_captures_gpu.py."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gristmill.autotune.captures import capturing


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
