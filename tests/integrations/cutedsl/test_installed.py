"""Whether these tests run at all: CuTe DSL is in an environment of its own."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from gristmill.kernels.cutedsl import PACKAGES
from tests.integrations.cutedsl.conftest import INSTALLED

PINNED = Path(__file__).parents[3] / "ci" / "hosts" / "cutedsl.txt"


@pytest.mark.skipif(
    not INSTALLED,
    reason='CuTe DSL is not installed: "$(bash ci/host_env.sh cutedsl python)" -m pytest tests/integrations/cutedsl',
)
def test_the_versions_are_the_pinned_ones() -> None:
    pinned = PINNED.read_text(encoding="utf-8").splitlines()
    for name, _ in PACKAGES:
        assert f"{name}=={version(name)}" in pinned
