"""The process of an engine of lab.engine_turns, with a planted engine and planted records of a device."""

from __future__ import annotations

import io
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from lab import engine_turns_child
from lab.engine_turns import Requests


class Planted:
    """Every request gives its tokens in one step."""

    version = "planted"
    step = "inner.step"

    def __init__(self, options: dict[str, Any]) -> None:
        self.calls = options["calls"]
        self.inner = SimpleNamespace(step=lambda: [SimpleNamespace(finish_reason="length")])

    def generate(self, prompts: list[list[int]], outputs: list[int], special: list[str]) -> int:
        os.write(self.calls, b"x")
        self.inner.step()
        return sum(outputs)


def answers(monkeypatch: pytest.MonkeyPatch, *work: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """What the process says, and how often it has run requests."""
    monkeypatch.setitem(engine_turns_child.ENGINES, "planted", Planted)
    (read, write), (calls, call) = os.pipe(), os.pipe()
    monkeypatch.setattr(sys, "argv", ["child", "planted", json.dumps({"calls": call}), str(write)])
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(json.dumps(line) + "\n" for line in work)))
    engine_turns_child.main()
    os.close(call)
    with os.fdopen(read) as said, os.fdopen(calls, "rb") as made:
        return [json.loads(line) for line in said], len(made.read())


def test_a_workload_is_timed_or_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [(0.0, 4.0, "product"), (5.0, 6.0, "norm"), (6.0, 8.0, "product")]
    monkeypatch.setattr(engine_turns_child, "recorded", lambda run: (run(), spans)[1])
    requests = Requests([[1], [2]], [2, 2])._asdict()
    said, calls = answers(monkeypatch, requests | {"trace": False}, requests | {"trace": True})
    start, timed, traced = said
    assert start["version"] == "planted" and timed["tokens"] == 4 and timed["steps"] == 1 and calls == 3
    assert traced["batch"] == 2 and traced["steps"] == 2 and traced["launches"] == 1.5
    assert traced["kernels"] == {"product": 3.0, "norm": 0.5} and traced["idle"] == 0.5


def test_steps_of_another_process_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_turns_child, "recorded", lambda run: [])
    with pytest.raises(ValueError, match="recorded no kernel"):
        answers(monkeypatch, Requests([[1]], [2])._asdict() | {"trace": True})
