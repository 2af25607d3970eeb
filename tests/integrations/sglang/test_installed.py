"""Whether these tests run at all: SGLang is in an environment of its own."""

from __future__ import annotations

import logging

import pytest

from gristmill.integrations import HostError
from gristmill.integrations.sglang import HOST, register
from tests.integrations.sglang.conftest import ROOT, installed


@pytest.mark.skipif(
    not installed(),
    reason='sglang is not installed: "$(bash ci/host_env.sh sglang python)" -m pytest tests/integrations/sglang',
)
def test_the_version_is_the_pinned_one() -> None:
    pinned = (ROOT / "ci" / "hosts" / "sglang.txt").read_text(encoding="utf-8")
    assert f"sglang=={HOST.require()}" in pinned.splitlines()


@pytest.mark.skipif(installed(), reason="sglang is installed")
def test_without_sglang_one_message(caplog: pytest.LogCaptureFixture) -> None:
    import gristmill.integrations.sglang as package

    served = r"serves SGLang >=0\.5\.23,<0\.5\.24, and it is not installed: pip install 'sglang>="
    with pytest.raises(HostError, match=served):
        _ = package.GristmillAttention
    with caplog.at_level(logging.WARNING, "gristmill"):
        register()
    assert "gristmill is not available in this SGLang: HostError: gristmill serves SGLang" in caplog.text
