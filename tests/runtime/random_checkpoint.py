"""A checkpoint with random weights, which are made when they are read: nothing is on disk."""

from __future__ import annotations

from typing import Any

import torch

from gristmill.quant.checkpoints.checkpoint import NoTokenizerError
from gristmill.runtime.loader.config import parse_config
from gristmill.runtime.models import model_table
from gristmill.tools.random_model import RandomCheckpoint

MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 1024,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "dtype": "bfloat16",
}
"""Two layers of Mixtral 8x7B, with few tokens."""


class Random(RandomCheckpoint):
    """The weights of a config.json on a device, in bfloat16."""

    def __init__(self, device: str, fields: dict[str, Any], **changes: Any) -> None:
        self.fields = fields | changes
        table = model_table(parse_config(self.fields, {}, "the test's config"))
        super().__init__(table, torch.bfloat16, torch.device(device))

    def config(self) -> tuple[dict[str, Any], dict[str, Any], str]:
        return self.fields, {}, "the test's config"

    def tokenizer(self) -> Any:
        raise NoTokenizerError("random weights have no tokenizer")
