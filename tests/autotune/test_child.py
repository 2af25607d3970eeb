"""Child processes that answer tasks: what one does whose parent is gone."""

from __future__ import annotations

import os
import subprocess
import sys

SERVE = """
from gristmill.autotune.child import serve
serve(lambda: lambda task: task + 1)
"""


def test_a_child_whose_parent_is_gone_ends_in_silence() -> None:
    reading, writing = os.pipe()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    child = subprocess.Popen(
        [sys.executable, "-c", SERVE],
        stdin=subprocess.PIPE,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    os.close(writing)
    assert child.stdin is not None
    child.stdin.write("1\n")
    child.stdin.flush()
    with os.fdopen(reading) as answers:
        assert answers.readline() == "2\n"
    child.stdin.write("2\n")
    _, errors = child.communicate(timeout=60)
    assert (child.returncode, errors) == (1, "")
