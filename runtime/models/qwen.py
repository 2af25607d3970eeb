"""Qwen2 (arXiv:2407.10671) and Qwen3 (arXiv:2505.09388): Llama with biases of q, k and v, or with norms of their heads.

Qwen3-MoE has experts in place of the feed-forward block, but for layers that the configuration names.
"""

from __future__ import annotations

from collections.abc import Iterator

from gristmill.runtime.loader.config import ModelConfig
from gristmill.runtime.loader.weights import Weight, WeightTable
from gristmill.runtime.models.llama import decoder_table, mlp


def table(c: ModelConfig) -> WeightTable:
    """Checkpoint tensors -> parameters."""

    def feed_forward(name: str, source: str, layer: int) -> Iterator[Weight]:
        if c.is_moe_layer(layer):
            yield from experts(c, name, f"{source}.mlp", ("gate_proj", "up_proj", "down_proj"))
        else:
            yield from mlp(c, name, f"{source}.mlp")

    return decoder_table(c, feed_forward)


def experts(c: ModelConfig, name: str, source: str, names: tuple[str, str, str]) -> Iterator[Weight]:
    """A router in float32 and experts; names: of their gate, up and down projections."""
    moe = c.moe
    if moe is None:
        return
    gate, up, down = (f"{source}.experts.{{expert}}.{part}" for part in names)
    count, ffn = moe.num_experts, moe.intermediate_size
    yield Weight(f"{name}.router", (f"{source}.gate.weight",), (count,), c.hidden_size, "fp32")
    yield Weight(f"{name}.experts.gate_up", (gate, up), (ffn, ffn), c.hidden_size, "linear", count)
    yield Weight(f"{name}.experts.down", (down,), (c.hidden_size,), ffn, "linear", count)
