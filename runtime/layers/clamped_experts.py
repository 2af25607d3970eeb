"""The experts of gpt-oss: linears with biases, interleaved gate and up rows, and a clamped activation between them.

g = min(gate, limit), u = clamp(up, -limit, limit), h = g · sigmoid(1.702 g) · (u + 1)
"""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill.autotune.packing import plan_layouts
from gristmill.quant import QuantTensor, pack
from gristmill.runtime.config import MoeConfig
from gristmill.runtime.layers.linear import Linear, Summand
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.loader.weights import Weights

ALPHA = 1.702


class ClampedExperts:
    """Router in float32 with a bias, softmax over the top-k logits, experts by the steps of `moe`."""

    def __init__(self, moe: MoeConfig, limit: float, plans: Plans, weights: Weights, name: str) -> None:
        self.moe, self.limit, self.plans = moe, limit, plans
        router, bias = (weights.tensor(f"{name}.{part}") for part in ("router", "router.bias"))
        self.router = Linear(plans, QuantTensor.from_dense(router), bias, dtype=torch.float32)
        self.topk = plans.bind(
            "grouped_topk",
            e=moe.num_experts,
            top_k=moe.top_k,
            n_group=1,
            topk_group=1,
            x="fp32",
            scoring="softmax",
            bias=False,
            renormalize=True,
        )
        down = f"{name}.experts.down"
        self.first, last = weights.shared_ranges(down)[plans.mesh.rank]
        self.experts = last - self.first
        self.permute = plans.bind("permute", top_k=moe.top_k, e=self.experts)
        self.gate_up = _Product(plans, weights, f"{name}.experts.gate_up", moe.top_k)
        self.down = _Product(plans, weights, f"{name}.experts.down", 0)
        self.combine = plans.bind("combine", top_k=moe.top_k, h=self.down.rows, x=plans.x)
        self.is_partial = weights.is_partial(down)

    def __call__(self, x: Tensor) -> Tensor | Summand:
        """x [tokens, hidden] -> [tokens, hidden], to be summed by the caller if ranks share the experts."""
        tokens, moe = x.shape[0], self.moe
        scores = x.new_empty(tokens, moe.top_k, dtype=torch.float32)
        ids = x.new_empty(tokens, moe.top_k, dtype=torch.int32)
        self.topk(self.router(x.float()), moe.top_k, None, 1, 1, "softmax", True, 1.0, scores, ids)
        if self.first:
            ids -= self.first
        offsets = ids.new_empty(self.experts + 1)
        permutation, inverse = ids.new_empty(ids.numel()), ids.new_empty(ids.numel())
        self.permute(ids, self.experts, offsets, permutation, inverse)
        # Entries of other ranks' experts come last. What is computed for them is not read.
        owner = ids.view(-1)[permutation.long()].long().clamp_(0, self.experts - 1)
        gate_up = self.gate_up(x, offsets, permutation, owner).float()
        gate = gate_up[:, 0::2].clamp(max=self.limit)
        up = gate_up[:, 1::2].clamp(-self.limit, self.limit)
        inner = (gate * torch.sigmoid(ALPHA * gate) * (up + 1)).to(x.dtype)
        rows, out = self.down(inner, offsets, None, owner), x.new_empty(x.shape)
        self.combine(rows, inverse, scores, out)
        return Summand(out) if self.is_partial else out


class _Product:
    """Rows times the matrix of their expert, plus its bias. top_k: for rows that are gathered by permutation, 0 = sorted rows."""

    def __init__(self, plans: Plans, weights: Weights, target: str, top_k: int) -> None:
        weight = weights.linear(target)
        self.bias = weights.tensor(f"{target}.bias")
        self.rows, self.top_k = weight.n, top_k
        problem = plans.problem(
            "grouped_linear",
            e=weight.shape[0],
            n=weight.n,
            k=weight.k,
            x=plans.x,
            w=str(weight.scheme),
            epilogue="none",
            gather=top_k,
        )
        layout = min(plan_layouts(plans.resolver, problem))
        self.plan = plans.bind_packed(problem, frozenset((layout,)))
        self.weight = pack(weight, layout).tensors
        plans.own(self.bias, *self.weight)

    def __call__(self, x: Tensor, offsets: Tensor, permutation: Tensor | None, owner: Tensor) -> Tensor:
        out = x.new_empty(owner.numel(), self.rows)
        self.plan(x, self.weight, offsets, permutation, self.top_k or 1, False, self.rows, out)
        return out + self.bias[owner]
