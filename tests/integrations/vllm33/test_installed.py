"""Whether these tests run at all: vLLM 0.33 is in an environment of its own."""

from __future__ import annotations

import pytest

from gristmill.integrations.vllm import HOST
from tests.integrations.vllm.conftest import ROOT, installed


@pytest.mark.skipif(
    not installed("0.33."),
    reason='vllm 0.33 is not installed: "$(bash ci/host_env.sh vllm33 python)" -m pytest tests/integrations/vllm33',
)
def test_the_version_is_the_pinned_one_and_the_newest() -> None:
    lines = (ROOT / "ci" / "hosts" / "vllm33.txt").read_text(encoding="utf-8").splitlines()
    version = HOST.require().partition("+")[0]
    assert f"vllm=={version}" in lines and version.startswith(HOST.tested[-1])
