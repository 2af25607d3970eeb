"""The entry point ``vllm.general_plugins``: vLLM calls `register` in each of its processes."""

from __future__ import annotations

import functools
import logging
from typing import Any

from gristmill.integrations.vllm.version import HOST

logger = logging.getLogger("vllm.gristmill")
WORKER = "gristmill.integrations.vllm.Worker"


def register() -> None:
    """Make gristmill's options known to vLLM. Nothing changes for those who use none of them.

    May be called more than once. Whatever fails is logged: an exception here would end vLLM.
    """
    try:
        HOST.require()
        _admit()
        _register_quantization()
        _register_attention()
    except Exception as error:
        logger.warning("gristmill is not available in this vLLM: %s: %s", type(error).__name__, error)


def _admit() -> None:
    """``--worker-cls gristmill...Worker`` implies the logits processor that refuses what the worker does not sample.

    A method of vLLM is replaced, because no hook fits: the entry point group ``vllm.logits_processors`` would refuse requests of every
    worker, and a platform plugin would be another platform. Who does not want it names the processor, and leaves the plugin out.
    """
    from vllm.engine.arg_utils import EngineArgs

    from gristmill.integrations.vllm.admission import ADMISSION

    create = EngineArgs.create_model_config
    if getattr(create, "gristmill", False):
        return

    @functools.wraps(create)
    def create_model_config(self: Any, *arguments: Any, **named: Any) -> Any:
        others = list(self.logits_processors or ())
        if self.worker_cls == WORKER and ADMISSION not in others:
            self.logits_processors = [*others, ADMISSION]
        return create(self, *arguments, **named)

    create_model_config.gristmill = True  # type: ignore[attr-defined]  # how a second call sees the first
    EngineArgs.create_model_config = create_model_config


def _register_quantization() -> None:
    """``--quantization gristmill``."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    from gristmill.integrations.vllm.quantization import NAME, GristmillConfig

    if NAME not in QUANTIZATION_METHODS:
        register_quantization_config(NAME)(GristmillConfig)


def _register_attention() -> None:
    """``--attention-backend CUSTOM``, unless another plugin has taken that name."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    path = "gristmill.integrations.vllm.custom.Backend"
    custom = AttentionBackendEnum.CUSTOM
    if not custom.is_overridden():
        register_backend(custom, path)
    elif custom.get_path() != path:
        logger.warning(
            "gristmill: the attention backend CUSTOM is %s, registered by another plugin; it stays",
            custom.get_path(),
        )
