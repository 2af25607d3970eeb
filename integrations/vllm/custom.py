"""The class behind ``--attention-backend CUSTOM``: vLLM has one name for backends of others, and looks it up for each attention layer.

``Backend`` is a class of latent attention for models that have it, and of grouped queries for all others.
"""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config_or_none

from gristmill.integrations.vllm.attention import GristmillAttentionBackend
from gristmill.integrations.vllm.mla import GristmillMLABackend


def __getattr__(name: str) -> Any:
    if name != "Backend":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    config = get_current_vllm_config_or_none()
    model = None if config is None else config.model_config
    return GristmillMLABackend if model is not None and model.use_mla else GristmillAttentionBackend
