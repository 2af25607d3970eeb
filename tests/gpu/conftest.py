"""Tests marked `alone` run while no other test uses the GPU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.turns import turn


@pytest.fixture(autouse=True)
def gpu_turn(request: pytest.FixtureRequest) -> Iterator[None]:
    folder = Path(tempfile.gettempdir()) / f"gristmill-gpu-tests-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    with turn(folder, alone=request.node.get_closest_marker("alone") is not None):
        yield
