"""Whether these tests run at all: Ray is in an environment of its own."""

from __future__ import annotations

import pytest

from gristmill.integrations import HostError
from gristmill.integrations.ray import HOST
from tests.integrations.ray.conftest import INSTALLED, ROOT


@pytest.mark.skipif(
    not INSTALLED,
    reason='ray is not installed: "$(bash ci/host_env.sh ray python)" -m pytest tests/integrations/ray',
)
def test_the_version_is_the_pinned_one() -> None:
    pinned = (ROOT / "ci" / "hosts" / "ray.txt").read_text(encoding="utf-8")
    assert f"ray=={HOST.require()}" in pinned.splitlines()


@pytest.mark.skipif(INSTALLED, reason="ray is installed")
@pytest.mark.parametrize("name", ["Generate", "Server", "build"])
def test_without_ray_one_message(name: str) -> None:
    import gristmill.integrations.ray as package

    with pytest.raises(HostError, match=r"serves Ray >=2\.60,<2\.61, and it is not installed: pip install"):
        getattr(package, name)
