"""Whether these tests run at all: LiteLLM is in an environment of its own."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from tests.integrations.litellm.conftest import INSTALLED

PINNED = Path(__file__).parents[3] / "ci" / "hosts" / "litellm.txt"


@pytest.mark.skipif(
    not INSTALLED,
    reason='litellm is not installed: "$(bash ci/host_env.sh litellm python)" -m pytest tests/integrations/litellm',
)
def test_the_version_is_the_pinned_one() -> None:
    assert f"litellm=={version('litellm')}" in PINNED.read_text(encoding="utf-8").splitlines()
