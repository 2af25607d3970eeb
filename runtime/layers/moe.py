"""A mixture of experts (DeepSeek-V3, arXiv:2412.19437, 2.1.2): routed ones by grouped top-k, and shared ones for every token.

Mixtral (arXiv:2401.04088) and Qwen3-MoE are special cases with one group, softmax scores and no shared experts. The products of
gpt-oss (arXiv:2508.10925) have biases, and a clamped activation between them. If the table has factors of the experts (Gemma 4), they multiply
their weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gristmill.autotune.bound import BoundPlan
from gristmill.autotune.packing import plan_layouts
from gristmill.kernel_registry.problem import AxisValue
from gristmill.kernels.common import ITEM_BYTES
from gristmill.quant import pack
from gristmill.quant.checkpoints.weights import Weights
from gristmill.runtime.config import MoeConfig
from gristmill.runtime.errors import CheckpointError
from gristmill.runtime.layers.codes import Codes
from gristmill.runtime.layers.linear import AllReduce, PartialSum
from gristmill.runtime.layers.linear_fp32 import LinearFp32
from gristmill.runtime.layers.loaded_schemes import in_scheme
from gristmill.runtime.layers.mlp import MLP
from gristmill.runtime.layers.plans import Plans


class MixtureOfExperts:
    """Router in float32, routed experts, shared experts as one MLP.

    Every rank has the router and all tokens, and runs its own experts; one sum over the ranks completes routed and shared experts.

    Args:
        reduce: False leaves the sum over the ranks to the caller, as in `load_linear`.
        clamp: alpha and limit of the clamped activation of `moe`; None = silu.

    Attributes:
        takes: the format of codes that it takes, with their values; None = floats alone.
    """

    takes_values = True
    """The router reads the values of x."""

    def __init__(
        self,
        moe: MoeConfig,
        plans: Plans,
        weights: Weights,
        name: str,
        *,
        reduce: bool = True,
        clamp: tuple[float, float] | None = None,
    ) -> None:
        self.moe = moe
        self.plans = plans
        self.target = f"{name}.experts"
        router = weights.tensor(f"{name}.router")
        bias = weights.optional(f"{name}.router.bias")
        # It is added to the scores, for the choice alone, or to the logits.
        self.bias = bias if moe.choice_bias else None
        self.router = LinearFp32(plans, router, None if moe.choice_bias else bias)
        self.expert_scale = weights.optional(f"{name}.experts.scale")
        plans.own(self.bias, self.expert_scale)
        choice: dict[str, AxisValue] = {
            "e": moe.num_experts,
            "top_k": moe.top_k,
            "n_group": moe.num_groups,
            "topk_group": moe.top_groups,
            "x": "fp32",
            "scoring": moe.scoring,
            "bias": moe.choice_bias,
            "renormalize": moe.norm_topk_prob,
        }
        self.topk = plans.bind("grouped_topk", **choice)
        self.first = weights.shard_ranges(f"{name}.experts.down")[plans.mesh.rank][0]
        part = weights.linear_part(f"{name}.experts.down")
        down = part.weight
        self.local = down.shape[0]
        self.topk_and_order = plans.bind("route", local=self.local, **choice)
        self.gate_up_bias = weights.optional(f"{name}.experts.gate_up.bias")
        self.down_bias = weights.optional(f"{name}.experts.down.bias")
        plans.own(self.gate_up_bias, self.down_bias)
        self.is_clamped, (self.alpha, self.limit) = clamp is not None, clamp or (0.0, 0.0)
        epilogue = {
            "w13_bias": self.gate_up_bias is not None,
            "w2_bias": self.down_bias is not None,
            "clamp": self.is_clamped,
        }
        # With weights on inputs, each expert of a token gets a row of its own.
        problem = plans.problem(
            "moe",
            top_k=1 if moe.weigh_input else moe.top_k,
            e=down.shape[0],
            h=down.n,
            i=down.k,
            x=plans.x,
            w=str(down.scheme),
            epilogue="+".join(flag for flag, is_set in epilogue.items() if is_set) or "none",
            activation=moe.activation,
        )
        floats, declared = problem, part.declared
        problem = plans.declared_experts(floats, declared)
        # gate and up have twice as many weights.
        growth = 3 * (down.n * down.k * down.shape[0] * ITEM_BYTES[plans.x] - down.nbytes)
        scheme = plans.schemes.choose(problem, growth, plans.resolver)
        takes_declared = problem != floats and scheme.activation is not None
        problem = problem.with_values(w=scheme.name)
        layouts = plan_layouts(plans.resolver, problem, layer=self.target)
        self.experts = plans.bind_packed(problem, layouts)
        self.inner, hidden, layout = down.k, down.n, next(iter(layouts))
        self.down = pack(in_scheme(down, scheme), layout).tensors
        del down, part  # free one before the other is packed, to bound peak memory
        part = weights.linear_part(f"{name}.experts.gate_up")
        if takes_declared and part.declared != declared:
            raise CheckpointError(
                f"{self.target}: the checkpoint declares {declared} activations for down and {part.declared or 'none'} for "
                "gate and up; experts take one format: load it with activations in floats (policy activations=float)"
            )
        self.gate_up = pack(in_scheme(part.weight, scheme), layout).tensors
        plans.own(*self.gate_up, *self.down)
        self.takes = None if moe.weigh_input else plans.takes_codes(problem)
        self._codes_plan: BoundPlan | None = None
        self.layouts = layouts
        self.all_reduce = AllReduce(plans, hidden) if weights.is_partial(f"{name}.experts.down") else None
        self.reduce = reduce
        # One sum completes both where the ranks share both.
        self.shared = None
        if moe.num_shared:
            self.shared = MLP(plans, weights, f"{name}.shared", reduce=self.all_reduce is None)
        self.shared_gate: LinearFp32 | None = None
        if moe.shared_gate:
            self.shared_gate = LinearFp32(plans, weights.tensor(f"{name}.shared_gate"))

    def __call__(self, x: Tensor | Codes, routed_by: Tensor | None = None) -> Tensor | PartialSum:
        """x [tokens, hidden] -> [tokens, hidden]. The x of codes has the values, which the router reads, unless it reads `routed_by`."""
        plan, codes, scales, whole = self.experts, None, None, x
        if isinstance(x, Codes):
            plan, (x, codes, scales) = self._codes_plan or self._bind_codes(), x
        tokens, each = x.shape[0], self.moe.top_k if self.moe.weigh_input else 1
        sorts = not self.plans.reads(plan, tokens * each, "permutation")
        choose = self.route_locally if sorts else self.route_and_sort
        scores, ids, *order = choose(x if routed_by is None else routed_by)
        given = x
        if self.moe.weigh_input:
            given = (x[:, None] * scores.to(x.dtype)[:, :, None]).flatten(0, 1)
            scores, ids = torch.ones_like(scores).view(-1, 1), ids.view(-1, 1)
        out = given.new_empty(given.shape)
        workspace = self.plans.workspace(plan, given.shape[0])
        plan(
            given,
            scores,
            ids,
            self.gate_up,
            self.down,
            self.inner,
            workspace,
            self.gate_up_bias,
            self.down_bias,
            self.is_clamped,
            self.alpha,
            self.limit,
            codes,
            scales,
            self.moe.activation,
            True,
            *order,
            out,
        )
        if len(out) > len(x):
            out = out.view(len(x), -1, out.shape[1]).sum(1)
        shared = None
        if self.shared is not None:
            shared = self.shared(whole if self.shared.takes == self.takes else x)
            if self.shared_gate is not None:
                value = shared.x if isinstance(shared, PartialSum) else shared
                value.mul_(self.shared_gate(x).sigmoid_())
        if isinstance(shared, PartialSum):
            out, shared = out + shared.x, None
        if self.all_reduce is not None:
            if shared is None and not self.reduce:
                return PartialSum(out)
            out = self.all_reduce(out)
        return out if shared is None else out + shared

    def _bind_codes(self) -> BoundPlan:
        """The plan of calls with codes, from the first of them on."""
        problem = self.experts.static.with_values(codes=True)
        self._codes_plan = self.plans.bind_packed(problem, self.layouts, again=True)
        return self._codes_plan

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights float32 and ids int32, [tokens, top_k] each, of the chosen experts of all ranks."""
        scores, ids = self._chosen(x)
        self.topk(*self._choice(x), scores, ids)
        if self.expert_scale is not None:
            scores.mul_(self.expert_scale[ids])
        return scores, ids

    def route_locally(self, x: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """The same with ids that count from this rank's first expert, so that those of other ranks are outside of the range, and add nothing; and
        no order of rows."""
        scores, ids = self.route(x)
        if self.first:
            ids -= self.first
        return scores, ids, None, None, None

    def route_and_sort(self, x: Tensor) -> tuple[Tensor, ...]:
        """The same with the order of rows by expert: expert_offsets, permutation and inverse of `permute`."""
        scores, ids = self._chosen(x)
        entries = ids.numel()
        order = [ids.new_empty(size) for size in (self.local + 1, entries, entries)]
        logits, top_k, *rest = self._choice(x)
        self.topk_and_order(logits, top_k, self.local, self.first, *rest, scores, ids, *order)
        if self.expert_scale is not None:
            scores.mul_(self.expert_scale[ids + self.first if self.first else ids])
        return scores, ids, *order

    def _choice(self, x: Tensor) -> tuple[Any, ...]:
        """The arguments of grouped_topk."""
        moe = self.moe
        return (
            self.router(x),
            moe.top_k,
            self.bias,
            moe.num_groups,
            moe.top_groups,
            moe.scoring,
            moe.norm_topk_prob,
            moe.scale,
        )

    def _chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Memory for weights and ids."""
        shape = x.shape[0], self.moe.top_k
        return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int32)
