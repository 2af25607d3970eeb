"""Threads of OpenMP that nobody needs end, and come back when they are needed."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import os, torch
from gristmill.runtime.openmp import release_team

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
x = torch.randn(512, 4096)
x.exp_()
before = threads()
release_team()
after = threads()
y = x.exp()
print(before - after, threads() - after, bool((y == x.exp()).all()))
"""


def test_a_team_ends_and_comes_back() -> None:
    """Two workers of three threads; results are the same."""
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, check=True, timeout=120
    )
    ended, again, same = done.stdout.split()
    assert int(ended) >= 2
    assert int(again) >= 2
    assert same == "True"
