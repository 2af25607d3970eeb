"""Which rank an error names when several end at once: the one that died, not those that lost their connection to it."""

from __future__ import annotations

import subprocess
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest

from gristmill.runtime.errors import RankError
from gristmill.runtime.parallel import rank_processes
from gristmill.runtime.parallel.child_process import ChildProcess, Failure
from gristmill.runtime.parallel.rank_processes import RankProcesses


class Ended:
    """A process that was killed; `status`: None = it is not known yet."""

    def __init__(self, status: int | None) -> None:
        self.status = status

    def poll(self) -> int | None:
        return self.status

    def wait(self, timeout: float) -> int:
        if self.status is None:
            raise subprocess.TimeoutExpired("rank", timeout)
        return self.status


def rank(number: int, status: int | None) -> tuple[ChildProcess, Connection]:
    here, there = Pipe()
    process: Any = Ended(status)
    return ChildProcess(number, process, -1, here, -1), there


@pytest.mark.parametrize(
    ("status", "died"), [(-9, r"rank 1 died \(SIGKILL\)"), (None, r"rank 1 died \(its pipe is closed\)")]
)
def test_a_rank_that_died_is_named_before_one_that_lost_it(
    status: int | None, died: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_processes, "GRACE", 0.05)
    ranks: Any = RankProcesses.__new__(RankProcesses)
    (first, of_first), (second, of_second) = rank(0, None), rank(1, status)
    ranks._processes, ranks._finalizer = [first, second], None
    of_first.send(Failure(RuntimeError("reset by peer"), "reset by peer", time.monotonic()))
    assert ranks._receive(first) is None  # the loss is heard of first
    of_second.close()
    with pytest.raises(RankError, match=died):
        ranks._fail("'step' failed", {0: first, 1: second})


def test_a_failure_is_named_if_nobody_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "GRACE", 0.05)
    ranks: Any = RankProcesses.__new__(RankProcesses)
    (first, of_first), (second, _open) = rank(0, None), rank(1, None)
    ranks._processes, ranks._finalizer = [first, second], None
    of_first.send(Failure(ValueError("first"), "first", time.monotonic()))
    assert ranks._receive(first) is None
    with pytest.raises(RankError, match="rank 0: 'step' failed"):
        ranks._fail("'step' failed", {0: first, 1: second})
