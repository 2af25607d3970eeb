"""Whether these tests run at all: the harness is in an environment of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from gristmill.integrations import HostError
from gristmill.integrations.lm_eval import HOST
from tests.integrations.lm_eval.conftest import INSTALLED

PINNED = Path(__file__).parents[3] / "ci" / "hosts" / "lm_eval.txt"


@pytest.mark.skipif(
    not INSTALLED,
    reason='lm_eval is not installed: "$(bash ci/host_env.sh lm_eval python)" -m pytest tests/integrations/lm_eval',
)
def test_the_version_is_the_pinned_one() -> None:
    assert f"lm_eval=={HOST.require()}" in PINNED.read_text(encoding="utf-8").splitlines()


@pytest.mark.skipif(INSTALLED, reason="lm_eval is installed")
@pytest.mark.parametrize("name", ["GristmillLM", "register"])
def test_without_the_harness_one_message(name: str) -> None:
    import gristmill.integrations.lm_eval as package

    with pytest.raises(
        HostError,
        match=r"serves lm-evaluation-harness >=0\.4\.13,<0\.4\.14, and it is not installed: pip install",
    ):
        getattr(package, name)
