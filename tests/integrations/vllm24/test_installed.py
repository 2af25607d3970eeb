"""Whether these tests run at all: vLLM 0.24 is in an environment of its own."""

from __future__ import annotations

import pytest

from gristmill.integrations.vllm import HOST
from tests.integrations.vllm.conftest import ROOT, installed


@pytest.mark.skipif(
    not installed("0.24."),
    reason='vllm 0.24 is not installed: "$(bash ci/host_env.sh vllm24 python)" -m pytest tests/integrations/vllm24',
)
def test_the_version_is_the_pinned_and_the_oldest_one() -> None:
    lines = (ROOT / "ci" / "hosts" / "vllm24.txt").read_text(encoding="utf-8").splitlines()
    version = HOST.require().partition("+")[0]
    assert f"vllm=={version}" in lines and version == HOST.minimum
