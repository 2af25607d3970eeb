"""route: grouped_topk and permute in one, experts of a rank, ties and NaN, refusals, planted faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gristmill import ops
from gristmill.kernels.moe.grouped_topk import op as grouped_topk
from gristmill.kernels.moe.permute import op as permute
from gristmill.kernels.moe.route import op as route
from tests.calls import positional
from tests.kernels.running import Runnable, padded_rows, runnables, verify_fault

HERE = runnables("route")
every_kernel = pytest.mark.parametrize("implementation", HERE, ids=str)


def logits_of(tokens: int, experts: int, seed: int = 0) -> torch.Tensor:
    """With ties."""
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(tokens, experts, generator=generator)).round() / 2


def run(implementation: Runnable, *arguments: Any) -> list[torch.Tensor]:
    """The outputs, in poisoned memory."""
    outputs = [
        torch.full(shape, -77 if dtype == torch.int32 else float("nan"), dtype=dtype)
        for shape, dtype in route.OP.like(*arguments)
    ]
    implementation(*arguments, **dict(zip(route.OP.outputs, outputs, strict=True)))
    return outputs


def agree(implementation: Runnable, *arguments: Any) -> None:
    outputs, references = run(implementation, *arguments), route.reference(*arguments)
    for found, expected in zip(outputs[1:], references[1:], strict=True):
        assert torch.equal(found, expected)
    torch.testing.assert_close(outputs[0], references[0], rtol=4e-6, atol=0, equal_nan=True)


def test_the_reference_is_one_operation_after_the_other() -> None:
    logits, bias = logits_of(33, 64), 0.1 * logits_of(1, 64, 1)[0]
    choice = (bias, 8, 3, "sigmoid", True, 2.5)
    weights, ids, *order = route.reference(logits, 4, 16, 24, *choice)
    expected, wanted = grouped_topk.reference(logits, 4, *choice)
    assert torch.equal(weights, expected) and torch.equal(ids, wanted - 24)
    for found, of_permute in zip(order, permute.reference(wanted - 24, 16), strict=True):
        assert torch.equal(found, of_permute)
    offsets, permutation, inverse = order
    for e in range(16):
        entries = permutation[int(offsets[e]) : int(offsets[e + 1])].tolist()
        assert entries == (wanted.flatten() == 24 + e).nonzero().flatten().tolist()
    foreign = (wanted.flatten() < 24) | (wanted.flatten() >= 40)
    assert 0 < int(foreign.sum()) < foreign.numel()
    assert torch.equal(inverse < 0, foreign)
    assert permutation[int(offsets[16]) :].tolist() == foreign.nonzero().flatten().tolist()


@every_kernel
@pytest.mark.parametrize("tokens", [1, 7, 64, 65, 257])
def test_numbers_of_tokens_and_experts_of_a_rank(implementation: Runnable, tokens: int) -> None:
    logits = logits_of(tokens, 40, tokens)
    for local, first in ((40, 0), (10, 30), (10, 0), (1, 17), (39, 1)):
        agree(implementation, logits, 4, local, first, None, 5, 2, "sigmoid", True, 2.5)


@every_kernel
def test_no_choice_is_a_number(implementation: Runnable) -> None:
    """A NaN ranks below every number; the order of rows is then that of the ids."""
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[nan] * 8, [nan, 1, nan, 0, nan, nan, nan, nan], [-inf] * 8, [0, inf, 0, 1] * 2])
    for local, first in ((8, 0), (3, 1)):
        agree(implementation, logits, 3, local, first, torch.zeros(8), 4, 2, "sigmoid", False, 1.0)
        agree(implementation, logits, 2, local, first)


@every_kernel
def test_rows_apart(implementation: Runnable) -> None:
    agree(implementation, padded_rows(logits_of(5, 40)), 4, 20, 10, None, 4, 2)


def test_refusals() -> None:
    logits = torch.zeros(2, 16)
    for arguments, message in (
        ((logits, 17, 16), r"top_k must be at most 16 .e., got 17"),
        ((logits, 2, 17), r"local must be at most 16 .e., got 17"),
        ((logits, 2, 0), "local must be at least 1, got 0"),
        ((logits, 2, 8, -1), "first must be at least 0, got -1"),
        ((logits, 2, 8, 9), "experts from 9 up to 17 .first, and local of them. are not among the 16"),
        ((logits, 3, 16, 0, None, 8, 1), "top_k must be 1 to 2"),
        ((logits, 2, 16, 0, None, 1, 1, "tanh"), "scoring must be one of sigmoid, softmax, got 'tanh'"),
    ):
        with pytest.raises(ValueError, match=message):
            route.OP.describe(*arguments)


def test_through_the_operator(policy_file: Any) -> None:
    policy_file("strict = true\n[pins]\nroute = ['route_cpu', 'route_torch']\n")
    logits = logits_of(7, 16)
    outputs = ops.route(logits, 2, 4, 8, scoring="sigmoid", scale=2.0)
    expected = route.reference(logits, 2, 4, 8, None, 1, 1, "sigmoid", True, 2.0)
    assert len(outputs) == 5
    for found, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(found, wanted)


FAULT = "m=33,e=64,local=16,top_k=4,n_group=8,topk_group=3,scoring=sigmoid,bias=true"
NAMES = (
    "logits",
    "top_k",
    "local",
    "first",
    "bias",
    "n_group",
    "topk_group",
    "scoring",
    "renormalize",
    "scale",
)


def _copy(arguments: tuple[Any, ...], values: tuple[torch.Tensor, ...]) -> None:
    for out, value in zip(arguments[len(NAMES) :], values, strict=True):
        out.copy_(value)


@positional
def ids_of_all_ranks(config: Any, *arguments: Any) -> None:
    """The order is that of the ids of this rank, and `first` is not subtracted from those that are returned."""
    weights, ids, *order = route.reference(*arguments[: len(NAMES)])
    _copy(arguments, (weights, ids + arguments[3], *order))


@positional
def order_of_all_ranks(config: Any, *arguments: Any) -> None:
    """The order is made before `first` is subtracted."""
    weights, ids, *_ = route.reference(*arguments[: len(NAMES)])
    _copy(arguments, (weights, ids, *permute.reference(ids + arguments[3], arguments[2])))


@positional
def last_token_first(config: Any, *arguments: Any) -> None:
    """Places of an expert are in descending entry."""
    weights, ids, *_ = route.reference(*arguments[: len(NAMES)])
    offsets, permutation, inverse = permute.reference(ids.flip(0), arguments[2])
    entries, top_k = ids.numel(), ids.shape[1]
    flipped = torch.arange(entries, dtype=torch.int32).view(-1, top_k).flip(0).flatten()
    _copy(
        arguments,
        (weights, ids, offsets, flipped[permutation.long()], inverse.view(-1, top_k).flip(0).flatten()),
    )


@positional
def a_place_twice(config: Any, *arguments: Any) -> None:
    """Two entries have the same place."""
    weights, ids, offsets, permutation, inverse = route.reference(*arguments[: len(NAMES)])
    permutation[0] = permutation[1]
    _copy(arguments, (weights, ids, offsets, permutation, inverse))


@pytest.mark.parametrize(
    "launcher", ["ids_of_all_ranks", "order_of_all_ranks", "last_token_first", "a_place_twice"]
)
def test_planted_faults(launcher: str) -> None:
    outcome = verify_fault("route", __name__, launcher, FAULT)
    assert not outcome.ok and "tolerance" in outcome.reason
