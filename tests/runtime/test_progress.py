"""What loading tells whoever listens."""

from __future__ import annotations

import threading
from itertools import groupby
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from gristmill import LLM
from gristmill.runtime.errors import ReplicaError
from gristmill.runtime.parallel import loading, reporter
from gristmill.runtime.progress import PHASES, progress_to
from tests.runtime.oracle import LLAMA, MODELS


def test_phases_come_in_order_and_to_their_ends(policy_file) -> None:
    """Weights are counted one by one; what is done never goes back within a phase; outside the block nobody is told."""
    policy_file()
    told: list[tuple[str, int, int]] = []
    with progress_to(lambda *progress: told.append(progress)):
        LLM(MODELS / LLAMA, device="cpu", dtype="fp32", max_seqs=2).close()
    phases = [phase for phase, _ in groupby(told, key=lambda one: one[0])]
    assert phases == [one for one in PHASES if one in phases]
    assert phases[:2] == ["weights", "selection"]
    weights = [(done, total) for phase, done, total in told if phase == "weights" and total]
    assert len(weights) == weights[0][1] > 10
    assert [done for done, _ in weights] == list(range(len(weights)))
    for phase in phases[2:]:
        counts = [done for one, done, _ in told if one == phase]
        assert counts == sorted(counts)
    before = len(told)
    LLM(MODELS / LLAMA, device="cpu", dtype="fp32", warm="off").close()
    assert len(told) == before


def test_reports_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message for each new phase, and others only after a while."""
    here, there = Pipe()
    now = 0.0
    monkeypatch.setattr(reporter.time, "monotonic", lambda: now)
    report = reporter.Reporter(there.send)
    for done in range(100):
        now += reporter.REPORT_SECONDS / 10
        report("weights", done, 100)
    report("selection", 0, 0)
    there.close()
    got = []
    while here.poll():
        try:
            got.append(here.recv())
        except EOFError:
            break
    assert got[0] == ("weights", 0, 100)
    assert got[-1] == ("selection", 0, 0)
    assert 10 <= len(got) <= 12


def test_all_processes_are_heard_at_once() -> None:
    """The second one says more than its pipe holds, and the first one loads until it has: none waits for another one's end."""
    pipes, children, told = [Pipe(), Pipe()], list[Any](), list[tuple[int, str, int, int]]()
    children += (SimpleNamespace(number=number, connection=here) for number, (here, _) in enumerate(pipes))
    said = threading.Event()

    def first() -> None:
        said.wait(60)
        pipes[0][1].send(("loaded",))

    def second() -> None:
        for done in range(20_000):
            pipes[1][1].send(("loading", "weights", done, 20_000))
        pipes[1][1].send(("loaded",))
        said.set()

    for work in (first, second):
        threading.Thread(target=work, daemon=True).start()
    loading.await_loaded(children, 60, lambda *progress: told.append(progress))
    assert told == [(1, "weights", done, 20_000) for done in range(20_000)]


def test_who_does_not_load_in_time_is_named() -> None:
    """Reports do not prolong it."""
    pipes = [Pipe(), Pipe()]
    children: list[Any] = [
        SimpleNamespace(number=number, connection=here) for number, (here, _) in enumerate(pipes)
    ]
    pipes[0][1].send(("loaded",))
    pipes[1][1].send(("loading", "weights", 1, 2))
    with pytest.raises(ReplicaError, match="replica 1 did not load the model in time"):
        loading.await_loaded(children, 0.05)
