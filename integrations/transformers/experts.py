"""transformers' experts interface over `ops.moe`: gated experts [E, 2I, H] and [E, H, I] in the dtype of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from gristmill import ops
from gristmill.integrations.transformers.plans import plan_of

LEFT: dict[str, str] = {}
"""Class of experts -> why transformers' own function runs them."""


def experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states [T, H], top_k_index and top_k_weights [T, k] -> [T, H].

    Experts of another form run transformers' ``batched_mm``; `explain` lists them.
    """
    reason = why_not(self)
    if reason is not None:
        LEFT.setdefault(type(self).__name__, reason)
        out: Tensor = ALL_EXPERTS_FUNCTIONS["batched_mm"](self, hidden_states, top_k_index, top_k_weights)
        return out
    gate_up, down = self.gate_up_proj.detach(), self.down_proj.detach()
    weights, ids = top_k_weights.float(), top_k_index.to(torch.int32)
    given = (hidden_states, weights, ids, [gate_up], [down], down.shape[-1])
    plan = plan_of("moe", (hidden_states, ids, gate_up, down), (down.shape[0],), given)
    return ops.moe(*given, plan=plan)


def why_not(self: Any) -> str | None:
    """None, or the reason why these experts are not ours to run."""
    config = self.config.get_text_config()
    activation = getattr(config, "hidden_act", getattr(config, "hidden_activation", "silu"))
    forms = {
        "without a gate": not self.has_gate,
        "with biases": self.has_bias,
        "stored transposed": self.is_transposed,
        "with gate and up interleaved": not self.is_concatenated,
        f"with the activation {activation}": activation not in ("silu", "swish"),
        "with a gating of their own": type(self)._apply_gate is not _default_apply_gate,
        f"in {self.down_proj.dtype}": self.down_proj.dtype
        not in (torch.float32, torch.float16, torch.bfloat16),
    }
    found = [form for form, is_so in forms.items() if is_so]
    return f"experts {', '.join(found)}" if found else None
