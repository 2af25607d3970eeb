"""Layers of experts: those whose kernels read the order of rows get it from the choice of experts, others choose alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from gristmill.kernel_registry.policy import Policy
from gristmill.kernels.moe.permute import op as permute
from gristmill.runtime.layers.moe import MixtureOfExperts
from gristmill.runtime.llm import LLM
from tests.runtime.oracle import DEEPSEEK


def experts_of(llm: LLM) -> MixtureOfExperts:
    """The last layer's."""
    mlp = llm.model.layers[-1].mlp  # type: ignore[attr-defined]
    assert isinstance(mlp, MixtureOfExperts)
    return mlp


def called(llm: LLM) -> set[str]:
    """The operations of which a kernel has been selected."""
    return {plan.op.name for plan in llm.model.plans.bound.values() if any(plan.entries)}


@pytest.mark.parametrize(("kernel", "sorts"), [("moe_chain_torch", True), ("moe_cpu", False)])
@pytest.mark.parametrize("warm", ["off", "auto"])
def test_who_gets_the_order(
    kernel: str, sorts: bool, warm: str, make: Callable[..., LLM], policy: Policy
) -> None:
    """With a warm-up, which records steps before their kernels are selected, and without."""
    limits = {"num_blocks": 20, "max_batch_tokens": 16, "max_seqs": 2, "max_model_len": 64}
    pinned = replace(policy, pins={"moe": (kernel,)})
    llm = make(DEEPSEEK, policy=pinned, warm=warm, decode_graphs=False, **limits)
    llm.generate([[5, 6, 7, 8]])
    assert called(llm) & {"grouped_topk", "route"} == ({"route"} if sorts else {"grouped_topk"})


@pytest.mark.parametrize("first", [0, 3])
def test_the_order_is_that_of_the_experts_of_a_rank(first: int, make_strict: Callable[..., LLM]) -> None:
    """Also where experts have factors, which belong to their ids of all ranks."""
    llm = make_strict(DEEPSEEK, "torch", warm="off")
    layer = experts_of(llm)
    plans, experts = layer.plans, layer.moe.num_experts
    layer.local, layer.first = experts - 4, first
    layer.topk_and_order = plans.bind_packed(layer.topk_and_order.static.with_values(local=layer.local))
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(9, llm.config.hidden_size, generator=generator).to(plans.dtype)
    for scale in (None, torch.rand(experts, generator=generator)):
        layer.expert_scale = scale
        scores, ids, *none = layer.route_locally(x)
        weights, local_ids, *order = layer.route_and_sort(x)
        assert none == [None, None, None]
        assert torch.equal(weights, scores) and torch.equal(local_ids, ids)
        for found, expected in zip(order, permute.reference(ids, layer.local), strict=True):
            assert torch.equal(found, expected)
        assert (order[2] < 0).any() and (order[2] >= 0).any()
