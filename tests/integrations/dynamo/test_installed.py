"""Whether these tests run at all: Dynamo is in an environment of its own."""

from __future__ import annotations

import pytest

from gristmill.integrations import HostError
from gristmill.integrations.dynamo import HOST
from tests.integrations.dynamo.conftest import INSTALLED, ROOT


@pytest.mark.skipif(
    not INSTALLED,
    reason='dynamo is not installed: "$(bash ci/host_env.sh dynamo python)" -m pytest tests/integrations/dynamo',
)
def test_the_version_is_the_pinned_one() -> None:
    pinned = (ROOT / "ci" / "hosts" / "dynamo.txt").read_text(encoding="utf-8")
    assert f"ai-dynamo=={HOST.require()}" in pinned.splitlines()


@pytest.mark.skipif(INSTALLED, reason="dynamo is installed")
def test_without_dynamo_one_message() -> None:
    import gristmill.integrations.dynamo as package

    with pytest.raises(
        HostError,
        match=r"serves NVIDIA Dynamo >=1\.6\.1,<1\.6\.2, and it is not installed: pip install 'ai-dynamo>=",
    ):
        _ = package.GristmillEngine
