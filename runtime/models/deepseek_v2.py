"""DeepSeek-V2 (arXiv:2405.04434): the latent attention and the experts of DeepSeek-V3, which are chosen by probability, without a bias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gristmill.runtime.config import Fields
from gristmill.runtime.errors import ConfigError
from gristmill.runtime.models import Family
from gristmill.runtime.models.deepseek_v3 import DeepseekV3, grouped_experts, latent_config, table

METHODS = ("greedy", "group_limited_greedy")


def config(fields: Fields, architecture: str) -> Mapping[str, Any]:
    """The most probable experts of all, or of the groups with the most probable ones. Their weights are not normalized."""
    method = fields.get("topk_method", str, "greedy")
    if method not in METHODS or fields.get("scoring_func", str, "softmax") != "softmax":
        raise ConfigError(
            f"{fields.origin}: scoring_func softmax with topk_method {' or '.join(METHODS)} is supported, got "
            f"{fields.data.get('scoring_func', 'softmax')} with {method}"
        )
    if fields.flag("norm_topk_prob", False):
        raise ConfigError(
            f"{fields.origin}: norm_topk_prob must be false for DeepSeek-V2, whose implementations differ where it is set"
        )
    moe = replace(grouped_experts(fields), norm_topk_prob=False, scoring="softmax", choice_bias=False)
    if method == "greedy":
        moe = replace(moe, num_groups=1, top_groups=1)
    return {**latent_config(fields), "moe": moe, "extra": {"nextn_layers": 0}}


FAMILY = Family(
    name="DeepSeek-V2",
    architectures={"DeepseekV2ForCausalLM": "deepseek_v2"},
    table=table,
    model=DeepseekV3,
    config=config,
)
