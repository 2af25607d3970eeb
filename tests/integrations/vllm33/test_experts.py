"""Expert layers of vLLM 0.33: the tests of the version that runs on CPUs. Apart from the others, because they end the groups of ranks."""

from __future__ import annotations

from tests.integrations.vllm.test_experts import *  # noqa: F403  # collected here
