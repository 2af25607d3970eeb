"""Tests inside vLLM 0.24, in its own environment: ``$(bash ci/host_env.sh vllm24 python) -m pytest tests/integrations/vllm24``."""

from __future__ import annotations

from tests.integrations.vllm.conftest import (
    environment,
    host,
    installed,
)  # fixtures, and whether this is that environment

__all__ = ["environment", "host"]
collect_ignore_glob = [] if installed("0.24.") else ["test_[!i]*.py"]  # test_installed.py says so
