"""Ceilings of the CPU in tests."""

from __future__ import annotations

import pytest

from gristmill.autotune import floor
from tests import ceilings


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor, "CPU_ROUNDS", ceilings.ROUNDS)
