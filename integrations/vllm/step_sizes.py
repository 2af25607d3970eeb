"""The numbers of tokens that vLLM's steps may have."""

from __future__ import annotations

from vllm.config.vllm import get_current_vllm_config_or_none

from gristmill.integrations.sizes import powers


def step_sizes() -> list[int]:
    """One for each bucket of plans, up to vLLM's limit per step. None outside of a configuration of vLLM: a layer that stands alone."""
    config = get_current_vllm_config_or_none()
    return [] if config is None else [*powers(config.scheduler_config.max_num_batched_tokens)]
