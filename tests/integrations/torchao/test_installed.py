"""Whether these tests run at all: torchao is in an environment of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from gristmill.integrations import HostError
from gristmill.integrations.torchao import HOST
from tests.integrations.torchao.conftest import INSTALLED

PINNED = Path(__file__).parents[3] / "ci" / "hosts" / "torchao.txt"


@pytest.mark.skipif(
    not INSTALLED,
    reason='torchao is not installed: "$(bash ci/host_env.sh torchao python)" -m pytest tests/integrations/torchao',
)
def test_the_version_is_the_pinned_one() -> None:
    assert f"torchao=={HOST.require().partition('+')[0]}" in PINNED.read_text(encoding="utf-8").splitlines()


@pytest.mark.skipif(INSTALLED, reason="torchao is installed")
@pytest.mark.parametrize("name", ["GristmillConfig", "enable", "disable"])
def test_without_torchao_one_message(name: str) -> None:
    import gristmill.integrations.torchao as package

    with pytest.raises(
        HostError, match=r"serves torchao >=0\.18,<0\.19, and it is not installed: pip install"
    ):
        getattr(package, name)
