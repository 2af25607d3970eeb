"""Which experts of vLLM 0.33 run on gristmill: the tests of the version that runs on CPUs."""

from __future__ import annotations

from tests.integrations.vllm.test_experts_choice import *  # noqa: F403  # collected here
