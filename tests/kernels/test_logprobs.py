"""logprobs: agreement with a computation token by token, ties, rows that are not numbers, strides, batches, refusals, planted faults."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gristmill import ops
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.sampling.logprobs import PART, reference
from tests.calls import positional
from tests.kernels.running import Runnable, padded_rows, runnables, verify_fault

OP = default_registry().op("logprobs")
KERNELS = pytest.mark.parametrize("implementation", runnables("logprobs"), ids=str)


def run(implementation: Runnable, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of a kernel, in poisoned memory."""
    outs = [torch.full(shape, -7, dtype=dtype) for shape, dtype in OP.like(*arguments)]
    implementation(*arguments, None, *outs)
    return outs[0], outs[1]


@KERNELS
@pytest.mark.parametrize("k", [0, 3, 20])
def test_agrees_with_a_computation_token_by_token(implementation: Runnable, k: int) -> None:
    draw = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(5, 2 * PART + 7, generator=draw)
    places, ids = torch.tensor([4, 0, 2]), torch.tensor([5, 0, 2 * PART + 6, 0, PART])
    values, tokens = run(implementation, logits, places, ids, k)
    for row, place in enumerate(places.tolist()):
        x = logits[place].tolist()
        total = math.log(math.fsum(map(math.exp, x)))
        ranked = sorted(range(len(x)), key=lambda token: -x[token])
        token = int(ids[place])
        expected = [x[token] - total, *(x[one] - total for one in ranked[:k])]
        assert values[row].tolist() == pytest.approx(expected, rel=2e-6, abs=2e-6)
        assert tokens[row].tolist() == [ranked.index(token), *ranked[:k]]


@KERNELS
def test_all_tokens_of_a_small_vocabulary_are_named_once(implementation: Runnable) -> None:
    """Also those that are equal, the lower id first, and those at -inf. -0.0 is 0.0."""
    logits = torch.tensor([[1.0, 1.0, -torch.inf, 1.0, -torch.inf, 0.0]])
    zeros = torch.tensor([[0.0, -0.0, 0.0]])
    assert run(implementation, zeros, *torch.zeros(2, 1, dtype=torch.int64), 3)[1].tolist() == [[0, 0, 1, 2]]
    values, tokens = run(implementation, logits, torch.tensor([0]), torch.tensor([3]), 6)
    assert tokens[0].tolist() == [0, 0, 1, 3, 5, 2, 4]
    assert values[0, 0] == values[0, 1] == values[0, 3] > values[0, 4] > values[0, 5] == -torch.inf


@KERNELS
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, PART + 3])
def test_a_row_that_is_not_numbers_has_no_logprobs(
    implementation: Runnable, value: float, place: int
) -> None:
    """Its neighbours have theirs. One token at -inf is no fault, a row of them is."""
    logits = torch.zeros(3, PART + 9)
    if value == -torch.inf:
        logits[1] = value
    logits[1, place] = value
    values, tokens = run(implementation, logits, torch.arange(3), torch.ones(3, dtype=torch.int64), 2)
    assert values[1].isnan().all() and not tokens[1].any()
    for row in (0, 2):
        assert values[row].tolist() == pytest.approx([-math.log(PART + 9)] * 3, abs=2e-6)


@KERNELS
def test_a_row_without_a_token_has_the_others(implementation: Runnable) -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0]])
    values, tokens = run(implementation, logits, torch.tensor([0]), torch.tensor([-1]), 1)
    assert values[0, 0].isnan() and tokens[0].tolist() == [0, 2] and values[0, 1] < 0


@KERNELS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_do_not_depend_on_the_batch_or_on_strides(implementation: Runnable, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(4)
    logits = torch.randn(9, 700, generator=draw).to(dtype)
    places, ids = torch.arange(9), torch.randint(0, 700, (9,), generator=draw)
    values, tokens = run(implementation, logits, places, ids, 5)
    for row in range(9):
        one = run(implementation, padded_rows(logits), places[row : row + 1], ids, 5)
        assert torch.equal(one[0][0], values[row]) and torch.equal(one[1][0], tokens[row])


def test_refuses_what_does_not_fit() -> None:
    logits, places, ids = torch.zeros(3, 8), torch.tensor([0, 2]), torch.zeros(3, dtype=torch.int64)
    for given, message in (
        ((logits, places.int(), ids, 1), "places"),
        ((logits, places, ids, 9), "k"),
        ((logits, places, ids, -1), "k"),
        ((logits, torch.tensor([3]), ids, 1), "places must be below 3"),
        ((logits, places, ids + 8, 1), "ids must be from -1 to 7"),
        ((logits.t(), places, ids, 1), "contiguous in its last dimension"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            ops.logprobs(*given)


@positional
def forgets_the_last_token(config: Any, *arguments: Any) -> None:
    """Planted fault."""
    logits, places, ids, k, _, values, tokens = arguments
    given = logits.clone()
    given[:, -1] = -torch.inf
    values[:], tokens[:] = reference(given, places, ids, k)


@positional
def counts_equal_ones_as_likelier(config: Any, *arguments: Any) -> None:
    """Planted fault."""
    *given, _, values, tokens = arguments
    values[:], tokens[:] = reference(*given)
    tokens[:, 0] += ~values[:, 0].isnan()


@positional
def names_one_twice(config: Any, *arguments: Any) -> None:
    """Planted fault: one of two equal tokens."""
    *given, _, values, tokens = arguments
    values[:], tokens[:] = reference(*given)
    for row in range(len(tokens)):
        for i in range(2, tokens.shape[1]):
            if values[row, i] == values[row, i - 1]:
                tokens[row, i] = tokens[row, i - 1]


@positional
def adds_in_half_precision(config: Any, *arguments: Any) -> None:
    """Planted fault."""
    *given, _, values, tokens = arguments
    values[:], tokens[:] = reference(*given)
    values[:] *= 1 + 2**-12


@pytest.mark.parametrize(
    "fault",
    ["forgets_the_last_token", "counts_equal_ones_as_likelier", "names_one_twice", "adds_in_half_precision"],
)
def test_a_planted_fault_is_seen(fault: str) -> None:
    assert not verify_fault("logprobs", __name__, fault, "m=33,v=31,k=31,x=fp32").ok
