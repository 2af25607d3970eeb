"""process_logits: agreement with a computation token by token, special values, slots, strides, refusals, planted faults."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gristmill import ops
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.sampling.process_logits import FED, NOTHING, PART, reference
from tests.calls import positional
from tests.kernels.running import Runnable, runnables, verify_fault

OP = default_registry().op("process_logits")
KERNELS = pytest.mark.parametrize("implementation", runnables("process_logits"), ids=str)


def run(implementation: Runnable, arguments: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of a kernel, in poisoned memory."""
    outs = [torch.full(shape, -7, dtype=dtype) for shape, dtype in OP.like(*arguments)]
    implementation(*arguments, *outs)
    return outs[0], outs[1]


def one_by_one(arguments: list[Any]) -> list[list[float]]:
    """The definition in Python floats, a token at a time."""
    logits, places, fed, slots, penalties, seen, bias, counted, barred, mask, mask_rows = (
        argument.tolist() for argument in arguments
    )
    rows = []
    for i, place in enumerate(places):
        row = []
        for token, x in enumerate(logits[place]):
            slot = slots[i]
            if bias and slot >= 0:
                x += bias[slot][token]
            if seen:
                state = seen[slot][token] if slot >= 0 else 0
                times = state // 2
                times += sum(fed[place] == token if one == FED else one == token for one in counted[i])
                if times or state % 2:
                    x = x / penalties[0][i] if x > 0 else x * penalties[0][i]
                x -= penalties[1][i] * times + penalties[2][i] * (times > 0)
            for after, banned in barred[i]:
                if banned == token and after in (NOTHING, fed[place]):
                    x = -math.inf
            if mask and mask_rows[i] >= 0 and not mask[mask_rows[i]][token // 32] >> (token % 32) & 1:
                x = -math.inf
            row.append(x)
        rows.append(row)
    return rows


@KERNELS
@pytest.mark.parametrize("text", ["m=9,v=131,x=fp32", "m=4,v=33,x=bf16", "m=3,v=257,x=fp16"])
def test_means_what_requests_ask_for(implementation: Runnable, text: str) -> None:
    arguments = OP.inputs(OP.problem(text), 5, "cpu")
    out, largest = run(implementation, arguments)
    expected = torch.tensor(one_by_one(arguments))
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=2e-6, equal_nan=True)
    chosen = arguments[0][arguments[1]].float()
    for values, found in ((chosen, largest[0]), (expected, largest[1])):
        most = torch.where(values.isnan(), torch.inf, values).amax(1, keepdim=True)
        torch.testing.assert_close(found, most, rtol=2e-6, atol=2e-6)


@KERNELS
@pytest.mark.parametrize("absent", ["seen", "bias", "mask", "counted", "barred", "all"])
def test_what_no_request_has_is_left_out(implementation: Runnable, absent: str) -> None:
    arguments = OP.inputs(OP.problem("m=6,v=300,x=fp32"), 6, "cpu")
    places = {"seen": 5, "bias": 6, "mask": 9}
    for name, place in places.items():
        if absent in (name, "all"):
            arguments[place] = arguments[place][:0]
    for name, place in (("counted", 7), ("barred", 8)):
        if absent in (name, "all"):
            arguments[place] = arguments[place][:, :0].contiguous()
    out, _ = run(implementation, arguments)
    expected = torch.tensor(one_by_one(arguments))
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=2e-6, equal_nan=True)
    if absent == "all":
        assert torch.equal(out.nan_to_num(), arguments[0][arguments[1]].nan_to_num())


@KERNELS
def test_a_part_of_columns_has_its_largest(implementation: Runnable) -> None:
    arguments = OP.inputs(OP.problem(f"m=2,v={2 * PART + 5},x=fp32"), 7, "cpu")
    for place in (5, 6, 9):
        arguments[place] = arguments[place][:0]
    arguments[8][:] = NOTHING
    logits = arguments[0]
    logits.zero_()
    row = int(arguments[1][1])
    logits[row, PART - 1], logits[row, PART], logits[row, 2 * PART + 4] = 3.0, float("nan"), -1.0
    logits[row, 2 * PART : 2 * PART + 4] = -torch.inf
    _, largest = run(implementation, arguments)
    assert largest[:, 1].tolist() == [[3.0, math.inf, -1.0]] * 2 and not largest[:, 0].any()


@KERNELS
def test_takes_rows_of_a_larger_tensor(implementation: Runnable) -> None:
    arguments = OP.inputs(OP.problem("m=5,v=64,x=bf16"), 8, "cpu")
    wide = torch.full((7, 100), float("nan"), dtype=torch.bfloat16)
    wide[:, 3:67] = arguments[0]
    expected = run(implementation, arguments)
    arguments[0] = wide[:, 3:67]
    for found, same in zip(run(implementation, arguments), expected, strict=True):
        assert torch.equal(found.nan_to_num(), same.nan_to_num())


def test_refuses_what_does_not_fit() -> None:
    arguments = OP.inputs(OP.problem("m=3,v=64,x=fp32"), 9, "cpu")
    for place, wrong, message in (
        (4, arguments[4][:2], "penalties"),
        (9, arguments[9][:, :1].contiguous(), "mask"),
        (5, arguments[5].long(), "seen"),
        (8, arguments[8][..., 0].contiguous(), "barred"),
    ):
        given = list(arguments)
        given[place] = wrong
        with pytest.raises((ValueError, TypeError), match=message):
            ops.process_logits(*given)


@positional
def forgets_the_fed_token(config: Any, *arguments: torch.Tensor) -> None:
    """Planted fault."""
    *given, out, largest = arguments
    given[7] = torch.where(given[7] == FED, NOTHING, given[7])
    out[:], largest[:] = reference(*given)


@positional
def bars_after_any_token(config: Any, *arguments: torch.Tensor) -> None:
    """Planted fault."""
    *given, out, largest = arguments
    given[8] = torch.stack([torch.full_like(given[8][..., 0], NOTHING), given[8][..., 1]], -1)
    out[:], largest[:] = reference(*given)


@positional
def takes_the_next_slot(config: Any, *arguments: torch.Tensor) -> None:
    """Planted fault."""
    *given, out, largest = arguments
    given[5] = given[5].roll(1, 0)
    out[:], largest[:] = reference(*given)


@positional
def shifts_the_mask(config: Any, *arguments: torch.Tensor) -> None:
    """Planted fault: one token further."""
    *given, out, largest = arguments
    given[9] = given[9] << 1
    out[:], largest[:] = reference(*given)


@pytest.mark.parametrize(
    "fault", ["forgets_the_fed_token", "bars_after_any_token", "takes_the_next_slot", "shifts_the_mask"]
)
def test_a_planted_fault_is_seen(fault: str) -> None:
    assert not verify_fault("process_logits", __name__, fault, "m=33,v=257,x=fp32").ok
