"""grouped_topk: meaning against transformers' routers, ties, NaN, refusals, planted faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from gristmill import ops
from gristmill.kernels.moe.grouped_topk import op as grouped_topk
from tests.calls import positional
from tests.kernels.running import Runnable, padded_rows, runnables, verify_fault

HERE = runnables("grouped_topk")
SHAPES = ((16, 2, 8, 2), (128, 2, 8, 2), (256, 8, 8, 4), (384, 8, 1, 1), (512, 22, 1, 1))


def _by_id(weights: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorts weights and ids by id: routers of transformers return their choice unsorted."""
    order = ids.argsort(-1)
    return weights.gather(-1, order), ids.gather(-1, order)


def _run(
    implementation: Runnable,
    logits: torch.Tensor,
    top_k: int,
    bias: Any = None,
    n_group: int = 1,
    topk_group: int = 1,
    scoring: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.full((*logits.shape[:-1], top_k), float("nan"))
    ids = torch.full((*logits.shape[:-1], top_k), -7, dtype=torch.int32)
    implementation(logits, top_k, bias, n_group, topk_group, scoring, renormalize, scale, weights, ids)
    return weights, ids


@pytest.mark.parametrize("tokens", [0, 1, 33, 64])
@pytest.mark.parametrize(("experts", "top_k", "n_group", "topk_group"), SHAPES)
def test_deepseek_v3(experts: int, top_k: int, n_group: int, topk_group: int, tokens: int) -> None:
    config = DeepseekV3Config(
        hidden_size=32,
        n_routed_experts=experts,
        num_local_experts=experts,
        n_group=n_group,
        topk_group=topk_group,
        num_experts_per_tok=top_k,
        routed_scaling_factor=2.5,
    )
    router = DeepseekV3TopkRouter(config)
    torch.manual_seed(experts + tokens)
    with torch.no_grad():
        router.weight.normal_()
        router.e_score_correction_bias.normal_(0, 0.1)
        logits, weights, ids = router(torch.randn(tokens, 32) / 4)
    actual_weights, actual_ids = grouped_topk.reference(
        logits,
        top_k,
        router.e_score_correction_bias,
        n_group,
        topk_group,
        "sigmoid",
        config.norm_topk_prob,
        2.5,
    )
    actual_weights, actual_ids = _by_id(actual_weights, actual_ids.long())
    weights, ids = _by_id(weights, ids)
    assert torch.equal(actual_ids, ids)
    torch.testing.assert_close(actual_weights, weights, rtol=1e-6, atol=0)


@pytest.mark.parametrize("renormalize", [False, True])
def test_softmax_routers(renormalize: bool) -> None:
    qwen = Qwen3MoeTopKRouter(
        Qwen3MoeConfig(
            hidden_size=32,
            num_experts=128,
            num_local_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=renormalize,
        )
    )
    mixtral = MixtralTopKRouter(MixtralConfig(hidden_size=32, num_local_experts=8, num_experts_per_tok=2))
    torch.manual_seed(1)
    for router, top_k in ((qwen, 8), (mixtral, 2)):
        if router is mixtral and not renormalize:
            continue
        with torch.no_grad():
            router.weight.normal_()
            logits, weights, ids = router(torch.randn(33, 32))
        actual_weights, actual_ids = grouped_topk.reference(
            logits, top_k, None, 1, 1, "softmax", renormalize, 1.0
        )
        assert torch.equal(actual_ids.long(), ids)
        torch.testing.assert_close(actual_weights, weights, rtol=1e-6, atol=0)


@pytest.mark.parametrize("implementation", HERE, ids=str)
def test_order_and_ties(implementation: Runnable) -> None:
    """The choice is in descending order, the lower index first among equals, also for equal groups; -0 equals
    0."""
    logits = torch.tensor(
        [[1.0, 3.0, 3.0, 2.0, 3.0, 2.0, -1.0, 0.0], [0.0, -0.0, 0.0, -0.0, 0.0, 0.0, -0.0, 0.0]]
    )
    _, ids = _run(implementation, logits, 5)
    assert ids.tolist() == [[1, 2, 4, 3, 5], [0, 1, 2, 3, 4]]
    bias = torch.tensor([0.0, 0, 0, 0, 0, 0, 0, 1.0])
    _, ids = _run(implementation, torch.zeros(1, 8), 3, bias, 4, 2, "sigmoid")
    assert ids.tolist() == [[7, 0, 1]], "the biased group first, then the first of the equal groups"


@pytest.mark.parametrize("implementation", HERE, ids=str)
def test_ids_stay_valid_with_nan_and_infinity(implementation: Runnable) -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor(
        [[nan] * 8, [nan, 1, nan, 0, nan, nan, nan, nan], [-inf] * 8, [0, inf, 0, -inf, 0, 0, 0, inf]]
    )
    bias = torch.zeros(8)
    weights, ids = _run(implementation, logits, 3, bias, 4, 2, "sigmoid", False)
    expected, wanted_ids = grouped_topk.reference(logits, 3, bias, 4, 2, "sigmoid", False)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=0, equal_nan=True)
    for row in ids.tolist():
        assert len(set(row)) == 3 and all(0 <= e < 8 for e in row)
    weights, ids = _run(implementation, logits[:2], 2)
    assert ids.tolist() == [[0, 1], [0, 1]] and weights.isnan().all(), (
        "a softmax with a NaN is all NaN, and shows it"
    )
    _, ids = _run(implementation, torch.zeros(1, 8), 4, torch.full((8,), -inf), 4, 2, "sigmoid")
    assert ids.tolist() == [[0, 1, 2, 3]], "experts outside the kept groups never come, whatever the bias"


@pytest.mark.parametrize("implementation", HERE, ids=str)
def test_row_strides(implementation: Runnable) -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(2))
    weights, ids = _run(implementation, padded_rows(logits), 4, None, 4, 2)
    expected, wanted_ids = grouped_topk.reference(logits, 4, None, 4, 2)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, expected, rtol=2e-6, atol=0)


def test_refusals() -> None:
    logits = torch.zeros(2, 16)
    for arguments, message in (
        ((logits, 17), r"top_k must be at most 16 .e., got 17"),
        ((logits, 3, None, 8, 1), "top_k must be 1 to 2"),
        ((logits, 2, None, 3, 1), "does not divide"),
        ((logits, 2, None, 4, 5), "topk_group must be 1 to 4"),
        ((logits, 2, torch.zeros(15)), r"bias must be \[e\] = \[16\], e as in logits, got \[15\]"),
        ((logits, 2, None, 1, 1, "tanh"), "scoring must be one of sigmoid, softmax, got 'tanh'"),
        ((logits, 2, None, 1, 1, "softmax", True, float("nan")), "scale must be finite"),
    ):
        with pytest.raises(ValueError, match=message):
            grouped_topk.OP.describe(*arguments)
    for arguments in ((logits.int(), 2), (logits, 2, torch.zeros(16).bfloat16())):
        with pytest.raises(TypeError):
            grouped_topk.OP.describe(*arguments)


def test_through_the_operator(policy_file: Any) -> None:
    policy_file("strict = true\n[pins]\ngrouped_topk = ['grouped_topk_cpu', 'grouped_topk_torch']\n")
    logits = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(3))
    weights, ids = ops.grouped_topk(logits, 2, scoring="sigmoid", scale=2.0)
    expected, wanted_ids = grouped_topk.reference(logits, 2, None, 1, 1, "sigmoid", True, 2.0)
    assert weights.shape == (3, 7, 2) and torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, expected)


FAULT = "m=33,e=64,top_k=4,n_group=8,topk_group=3,scoring=sigmoid,bias=true"


@positional
def biased_weights(
    config, logits, top_k, bias, n_group, topk_group, scoring, renormalize, scale, weights, ids
) -> None:
    scores = logits.float().sigmoid()
    _, top_ids = grouped_topk.choose(scores, top_k, bias, n_group, topk_group)
    chosen = (scores + bias).gather(-1, top_ids)
    weights.copy_(chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scale)
    ids.copy_(top_ids)


@positional
def best_of_group(
    config, logits, top_k, bias, n_group, topk_group, scoring, renormalize, scale, weights, ids
) -> None:
    scores = logits.float().sigmoid()
    _, top_ids = grouped_topk.choose(scores + bias, top_k, None, n_group, topk_group)
    chosen = scores.gather(-1, top_ids)
    weights.copy_(chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scale)
    ids.copy_(top_ids)


@positional
def not_renormalized(
    config, logits, top_k, bias, n_group, topk_group, scoring, renormalize, scale, weights, ids
) -> None:
    reference = grouped_topk.reference(logits, top_k, bias, n_group, topk_group, scoring, False, scale)
    weights.copy_(reference[0])
    ids.copy_(reference[1])


@positional
def higher_index_first(
    config, logits, top_k, bias, n_group, topk_group, scoring, renormalize, scale, weights, ids
) -> None:
    flipped = None if bias is None else bias.flip(0)
    reference = grouped_topk.reference(
        logits.flip(-1), top_k, flipped, n_group, topk_group, scoring, renormalize, scale
    )
    weights.copy_(reference[0])
    ids.copy_(logits.shape[-1] - 1 - reference[1])


@pytest.mark.parametrize(
    "launcher", ["biased_weights", "best_of_group", "not_renormalized", "higher_index_first"]
)
def test_planted_faults(launcher: str) -> None:
    outcome = verify_fault("grouped_topk", __name__, launcher, FAULT)
    assert not outcome.ok and "tolerance" in outcome.reason


def test_a_near_tie_behind_an_exact_one_excuses_a_row() -> None:
    """The scores that follow a choice decide it, behind all that are equal to it; equal ones alone do not."""
    close, apart = 1.0 - 2**-24, 1.0 - 2**-12
    logits = torch.tensor(
        [[2.0, 1.0, 1.0, close], [2.0, 1.0, 1.0, apart], [2.0, 1.0, 0.0, close]], dtype=torch.float64
    )
    for scoring in ("sigmoid", "softmax"):
        near = grouped_topk.near_ties(logits, 2, None, 1, 1, scoring)
        assert near.tolist() == [True, False, True]
