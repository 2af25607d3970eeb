"""merge_attention_states: agreement with unsplit attention in float64, empty partial results, log-sum-exps
far apart, planted faults."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gristmill import ops
from gristmill.kernels.attention.merge_attention_states.op import OP, reference
from tests.calls import positional
from tests.kernels.running import Runnable, runnables, verify_fault

INF = math.inf


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.einsum("thd,shd->ths", q, k)
    return torch.einsum("ths,shd->thd", scores.softmax(-1), v), scores.logsumexp(-1)


def test_two_halves_of_an_attention_are_the_whole() -> None:
    q, k, v = torch.randn(5, 3, 16).double(), torch.randn(40, 3, 16).double(), torch.randn(40, 3, 16).double()
    expected, whole_lse = _attention(q, k, v)
    a, a_lse = _attention(q, k[:13], v[:13])
    b, b_lse = _attention(q, k[13:], v[13:])
    out, lse = reference(a.float(), a_lse.float(), b.float(), b_lse.float())
    torch.testing.assert_close(out.double(), expected, rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(lse.double(), whole_lse, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("implementation", runnables("merge_attention_states"), ids=str)
@pytest.mark.parametrize("garbage", [math.nan, INF, 3.0])
def test_empty_partials_add_nothing(implementation: Runnable, garbage: float) -> None:
    a, b = torch.randn(4, 1, 19), torch.randn(4, 1, 19)
    a[0] = a[2] = b[1] = b[2] = garbage
    a_lse, b_lse = torch.tensor([[-INF], [1.5], [-INF], [0.5]]), torch.tensor([[-2.0], [-INF], [-INF], [0.5]])
    out, lse = torch.full_like(a, math.nan), torch.full_like(a_lse, math.nan)
    implementation(a, a_lse, b, b_lse, out, lse)
    assert torch.equal(out[0], b[0]) and torch.equal(out[1], a[1]) and (out[2] == 0).all()
    torch.testing.assert_close(out[3], (a[3] + b[3]) / 2)
    torch.testing.assert_close(lse[:, 0], torch.tensor([-2.0, 1.5, -INF, 0.5 + math.log(2)]))


@pytest.mark.parametrize("implementation", runnables("merge_attention_states"), ids=str)
def test_far_apart_and_huge_log_sum_exps(implementation: Runnable) -> None:
    a, b = torch.full((4, 1, 3), 1.0), torch.full((4, 1, 3), -1.0)
    a_lse, b_lse = (
        torch.tensor([[300.0], [-300.0], [1e30], [-1e30]]),
        torch.tensor([[-300.0], [-290.0], [1e30], [-1e30]]),
    )
    out, lse = torch.empty_like(a), torch.empty_like(a_lse)
    implementation(a, a_lse, b, b_lse, out, lse)
    far = math.exp(-10)
    expected = torch.tensor([1.0, (far - 1) / (far + 1), 0.0, 0.0])
    torch.testing.assert_close(out[:, 0, 0], expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(
        lse[:, 0], torch.tensor([300.0, -290.0 + math.log1p(far), 1e30, -1e30]), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("implementation", runnables("merge_attention_states"), ids=str)
def test_nan_stays_in_its_row_and_out_may_be_a(implementation: Runnable) -> None:
    a, b = torch.randn(3, 2, 37).bfloat16(), torch.randn(3, 2, 37).bfloat16()
    a_lse, b_lse = torch.randn(3, 2), torch.randn(3, 2)
    a_lse[1, 0] = math.nan
    expected, wanted_lse = reference(a, a_lse, b, b_lse)
    assert expected[1, 0].isnan().all() and expected.isnan().sum() == 37
    lse = torch.empty_like(a_lse)
    implementation(a, a_lse, b, b_lse, a, lse)
    torch.testing.assert_close(a, expected, rtol=8e-3, atol=1e-3, equal_nan=True)
    torch.testing.assert_close(lse, wanted_lse, rtol=2e-6, atol=1e-6, equal_nan=True)


def test_refusals_and_guards() -> None:
    a, b, a_lse, b_lse = torch.randn(4, 2, 8), torch.randn(4, 2, 8), torch.randn(4, 2), torch.randn(4, 2)
    cases: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
        (ValueError, r"a must be \[t, h, d\]", (a[0], a_lse, b, b_lse)),
        (ValueError, r"b must be \[t, h, d\] = \[4, 2, 8\]", (a, a_lse, b[:3], b_lse)),
        (TypeError, "b must have a's dtype torch.float32", (a, a_lse, b.half(), b_lse)),
        (TypeError, "a_lse must be torch.float32", (a, a_lse.half(), b, b_lse)),
        (ValueError, r"b_lse must be \[t, h\] = \[4, 2\]", (a, a_lse, b, b_lse.t())),
        (ValueError, "b must be contiguous", (a, a_lse, torch.randn(2, 4, 8).transpose(0, 1), b_lse)),
    ]
    for kind, message, arguments in cases:
        with pytest.raises(kind, match=message):
            ops.merge_attention_states(*arguments)
    static, out, lse = OP.static(OP.problem("h=2,d=8,x=fp32")), torch.empty_like(a), torch.empty_like(a_lse)
    assert OP.guard(static)(OP.Call(a, a_lse, b, b_lse, out, lse)) == 4
    for wrong in (
        (a, a_lse, b, b_lse, out[:3], lse),
        (a, a_lse, b, b_lse, out, lse[:3]),
        (a, a_lse.half(), b, b_lse, out, lse),
        (a, a_lse, b.half(), b_lse, out, lse),
        (a, a_lse, b, b_lse, torch.empty(2, 4, 8).transpose(0, 1), lse),
        (a[:, :1], a_lse, b, b_lse, out, lse),
        (a, a_lse, b, torch.empty(2, 4).t(), out, lse),
    ):
        with pytest.raises(ValueError, match="planned for|contiguous"):
            OP.guard(static)(OP.Call(*wrong))


@positional
def base_two(config: Any, a: Any, a_lse: Any, b: Any, b_lse: Any, out: Any, lse: Any) -> None:
    merged, total = reference(a, a_lse * math.log(2), b, b_lse * math.log(2))
    out.copy_(merged)
    lse.copy_(total / math.log(2))


@positional
def heads_rolled(config: Any, a: Any, a_lse: Any, b: Any, b_lse: Any, out: Any, lse: Any) -> None:
    merged, _ = reference(a, a_lse.roll(1, 1), b, b_lse.roll(1, 1))
    out.copy_(merged)
    lse.copy_(reference(a, a_lse, b, b_lse)[1])


@positional
def empty_rows_kept(config: Any, a: Any, a_lse: Any, b: Any, b_lse: Any, out: Any, lse: Any) -> None:
    merged, total = reference(a, a_lse, b, b_lse)
    empty = total == -INF
    out.copy_(torch.where(empty[..., None], 1.0, merged))
    lse.copy_(total)


@positional
def larger_lse_only(config: Any, a: Any, a_lse: Any, b: Any, b_lse: Any, out: Any, lse: Any) -> None:
    out.copy_(reference(a, a_lse, b, b_lse)[0])
    lse.copy_(torch.maximum(a_lse, b_lse))


@positional
def tail_unweighted(config: Any, a: Any, a_lse: Any, b: Any, b_lse: Any, out: Any, lse: Any) -> None:
    merged, total = reference(a, a_lse, b, b_lse)
    merged[..., -1] *= 1 + 2**-6
    out.copy_(merged)
    lse.copy_(total)


@pytest.mark.parametrize(
    "fault", ["base_two", "heads_rolled", "empty_rows_kept", "larger_lse_only", "tail_unweighted"]
)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_verification_catches_wrong_kernels(fault: str, dtype: str) -> None:
    assert not verify_fault("merge_attention_states", __name__, fault, f"t=33,h=5,d=33,x={dtype}").ok


def test_operator(policy_file: Any) -> None:
    policy_file()
    a, b, a_lse, b_lse = torch.randn(4, 2, 8), torch.randn(4, 2, 8), torch.randn(4, 2), torch.randn(4, 2)
    out, lse = ops.merge_attention_states(a, a_lse, b, b_lse)
    expected = reference(a, a_lse, b, b_lse)
    torch.testing.assert_close(out, expected[0], rtol=4e-6, atol=1e-6)
    torch.testing.assert_close(lse, expected[1], rtol=4e-6, atol=1e-6)
    torch.library.opcheck(torch.ops.gristmill.merge_attention_states.default, (a, a_lse, b, b_lse))
