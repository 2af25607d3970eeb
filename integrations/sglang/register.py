"""The entry point ``sglang.srt.plugins``: SGLang calls `register` in each of its processes, before it reads its arguments."""

from __future__ import annotations

import logging
from typing import Any

from gristmill.integrations.sglang.version import HOST

LOG = logging.getLogger("gristmill")
NAME = "gristmill"


def register() -> None:
    """Make ``--attention-backend gristmill`` and ``--quantization gristmill`` known. Nothing changes for those who use neither.

    May be called more than once. Whatever fails is logged: SGLang starts without gristmill. A name that another plugin has taken
    stays with that plugin.
    """
    try:
        HOST.require()
        _register_attention()
        _register_quantization()
    except Exception as error:
        LOG.warning("gristmill is not available in this SGLang: %s: %s", type(error).__name__, error)


def _register_attention() -> None:
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

    if ATTENTION_BACKENDS.setdefault(NAME, _make_attention) is not _make_attention:
        LOG.warning("gristmill: another plugin has the attention backend %s; it stays", NAME)
        return
    register_attention_backend(NAME)(_make_attention)
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])


def _make_attention(model_runner: Any) -> Any:
    """The backend of a model, when SGLang has loaded it."""
    from gristmill.integrations.sglang.attention import GristmillAttention

    return GristmillAttention(model_runner)


def _register_quantization() -> None:
    from sglang.srt.arg_groups.choices import QUANTIZATION_CHOICES, add_quantization_method_choices
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS

    from gristmill.integrations.sglang.quantization import GristmillConfig

    if QUANTIZATION_METHODS.setdefault(NAME, GristmillConfig) is not GristmillConfig:
        LOG.warning("gristmill: another plugin has the quantization method %s; it stays", NAME)
        return
    if NAME not in QUANTIZATION_CHOICES:
        add_quantization_method_choices([NAME])
