"""The worker, its server, the attention backends and the registration inside vLLM 0.33: the tests of 0.32 that need none of its own kernels."""

from __future__ import annotations

from tests.integrations.vllm.test_plugin import *  # noqa: F403  # collected here
from tests.integrations.vllm.test_server import *  # noqa: F403  # collected here
from tests.integrations.vllm24.test_vllm import *  # noqa: F403  # collected here

del test_vllms_own_model_by_the_commands_of_the_page  # noqa: F821  # its model runs on vLLM's kernels for CPUs
