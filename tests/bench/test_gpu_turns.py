"""Turns of GPU tests: several run concurrently, none beside a test that runs alone, and that one need not
wait for all others."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from tests.gpu.turns import turn


def test_who_is_alone_is_alone(tmp_path: Path) -> None:
    inside: list[str] = []
    inside_when_alone: list[list[str]] = []
    together, result = threading.Barrier(4), threading.Event()

    def beside(first: bool) -> None:
        if first:
            with turn(tmp_path, alone=False):
                together.wait(timeout=60)  # three at once, before any thread asks to be alone
        while not result.is_set():
            with turn(tmp_path, alone=False):
                inside.append("beside")
                time.sleep(0.002)
                inside.remove("beside")

    def alone() -> None:
        together.wait(timeout=60)
        for _ in range(5):  # ends although the others keep coming
            with turn(tmp_path, alone=True):
                inside.append("alone")
                time.sleep(0.01)
                inside_when_alone.append(list(inside))
                inside.remove("alone")
        result.set()

    threads = [threading.Thread(target=beside, args=(True,), daemon=True) for _ in range(3)] + [
        threading.Thread(target=alone, daemon=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert inside_when_alone == [["alone"]] * 5
