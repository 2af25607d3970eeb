"""A mixture of experts (DeepSeek-V3, arXiv:2412.19437, 2.1.2): routed ones by grouped top-k, and shared ones for every token."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill.quant import QuantTensor
from gristmill.runtime.layers.linear import Linear
from gristmill.runtime.layers.mlp import MLP
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.loader.config import MoeConfig
from gristmill.runtime.loader.weights import Weights


class MixtureOfExperts:
    """Router in float32, routed experts, shared experts as one MLP."""

    def __init__(self, moe: MoeConfig, plans: Plans, weights: Weights, name: str) -> None:
        self.moe = moe
        self.plans = plans
        router = QuantTensor.from_dense(weights.tensor(f"{name}.router"))
        self.router = Linear(plans, router, dtype=torch.float32)
        self.bias = weights.tensor(f"{name}.router.bias")
        plans.own(self.bias)
        self.topk = plans.bind(
            "grouped_topk",
            f"e={moe.num_experts},top_k={moe.top_k},n_group={moe.num_groups},topk_group={moe.top_groups},x=fp32,"
            f"scoring=sigmoid,bias=true,renormalize={str(moe.norm_topk_prob).lower()}",
        )
        self.gate_up = weights.linear(f"{name}.experts.gate_up")
        self.down = weights.linear(f"{name}.experts.down")
        self.shared = MLP(plans, weights, f"{name}.shared") if moe.num_shared else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        tokens, moe = x.shape[0], self.moe
        scores = x.new_empty(tokens, moe.top_k, dtype=torch.float32)
        ids = x.new_empty(tokens, moe.top_k, dtype=torch.int32)
        self.topk(
            self.router(x.float()), moe.top_k, self.bias, moe.num_groups, moe.top_groups, "sigmoid", moe.norm_topk_prob,
            moe.scale, scores, ids,
        )  # fmt: skip
        out = _shim(x, self.gate_up, self.down, scores, ids)
        return out if self.shared is None else out + self.shared(x)


def _shim(x, gate_up, down, scores, ids):
    out = torch.zeros(x.shape, dtype=torch.float32)
    gu, dn = gate_up.dequantize().float(), down.dequantize().float()
    for e in range(gu.shape[0]):
        rows, which = (ids == e).nonzero(as_tuple=True)
        if len(rows):
            g, u = (x[rows].float() @ gu[e].T).chunk(2, -1)
            out.index_add_(0, rows, (torch.nn.functional.silu(g) * u) @ dn[e].T * scores[rows, which, None])
    return out.to(x.dtype)
