"""Tests inside vLLM 0.24, in its own environment: ``$(bash ci/host_env.sh vllm24 python) -m pytest tests/integrations/vllm24``."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from tests.integrations.vllm.conftest import environment, host  # fixtures

__all__ = ["environment", "host"]


def installed() -> bool:
    """Whether this is the environment with vLLM 0.24."""
    try:
        return version("vllm").startswith("0.24.")
    except PackageNotFoundError:
        return False


collect_ignore_glob = [] if installed() else ["test_[!i]*.py"]  # test_installed.py says so
