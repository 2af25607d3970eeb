"""Switching gristmill on in transformers, and off again."""

from __future__ import annotations

from typing import Any

from transformers.integrations.moe import ExpertsInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from gristmill.integrations.transformers.attention import attention, mask, paged
from gristmill.integrations.transformers.experts import LEFT, experts
from gristmill.integrations.transformers.quantizer import GristmillConfig, GristmillQuantizer

NAME = "gristmill"
EAGER = "paged|eager"
_THEIRS: dict[str, Any] = {}
"""transformers' own function under a name that ours has taken."""


def enable(*, paged_eager: bool = False) -> None:
    """Register ``attn_implementation="gristmill"``, ``experts_implementation="gristmill"`` and `GristmillConfig` with transformers.

    Models choose them by name; those that do not are untouched. Calling it again changes nothing.

    Args:
        paged_eager: run continuous batching of models with ``attn_implementation="eager"`` by our kernels, too. transformers 5.17 takes
            ``gristmill`` for continuous batching as it is; 5.23 takes no name but its own, and this is the way in there, with
            ``ContinuousBatchingConfig(auto_switch_to_flash=False)``.
    """
    AttentionInterface.register(NAME, attention)
    AttentionInterface.register(f"paged|{NAME}", paged)
    AttentionMaskInterface.register(NAME, mask)
    ExpertsInterface.register(NAME, experts)
    AUTO_QUANTIZATION_CONFIG_MAPPING[NAME] = GristmillConfig
    AUTO_QUANTIZER_MAPPING[NAME] = GristmillQuantizer
    if paged_eager:
        _THEIRS.setdefault(EAGER, AttentionInterface._global_mapping[EAGER])
        AttentionInterface.register(EAGER, paged)


def disable() -> None:
    """Undo `enable`: the names are unknown to transformers again. Models that were made with them cannot run from then on."""
    for mapping, name in (
        (AttentionInterface._global_mapping, NAME),
        (AttentionInterface._global_mapping, f"paged|{NAME}"),
        (AttentionMaskInterface._global_mapping, NAME),
        (ExpertsInterface._global_mapping, NAME),
        (AUTO_QUANTIZATION_CONFIG_MAPPING, NAME),
        (AUTO_QUANTIZER_MAPPING, NAME),
    ):
        mapping.pop(name, None)
    for name in [*_THEIRS]:
        AttentionInterface.register(name, _THEIRS.pop(name))


def explain() -> dict[str, str]:
    """Class of experts -> why transformers' own function ran them although ``experts_implementation="gristmill"`` was asked for."""
    return dict(LEFT)
