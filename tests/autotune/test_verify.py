"""Verification rejects wrong kernels for the right reason, and accepts correct ones."""

from __future__ import annotations

import pytest
import torch

from gristmill.autotune import metrics
from gristmill.autotune import verify as verifying
from gristmill.autotune.errors import UnverifiableError
from gristmill.autotune.guard import same_bits
from gristmill.autotune.verify import Verifier, verify
from tests.autotune import zoo

PROBLEM = zoo.OP.problem("m=7,n=257,x=bf16")


def test_an_honest_kernel_passes() -> None:
    outcome = verify(zoo.OP, zoo.kernel(zoo.honest), {}, PROBLEM, "cpu")
    assert outcome.ok and outcome.error == 0.0


@pytest.mark.parametrize("function", zoo.WRONG, ids=lambda f: f.__name__)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_wrong_kernel_does_not(function, seed: int) -> None:
    outcome = verify(zoo.OP, zoo.kernel(function), {}, PROBLEM, "cpu", seed=seed)
    assert not outcome.ok and outcome.reason


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (zoo.writes_one_element_too_far, "wrote outside out"),
        (zoo.writes_one_element_too_early, "wrote outside out"),
        (zoo.changes_its_input, "changed its input x"),
        (zoo.raises, "RuntimeError: no such instruction"),
        (zoo.one_weight_is_off, "over the tolerance"),
        (zoo.one_nan, "error inf"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_reason_says_what_was_wrong(function, reason: str) -> None:
    assert reason in verify(zoo.OP, zoo.kernel(function), {}, PROBLEM, "cpu").reason


def test_a_kernel_that_gets_no_memory_is_not_wrong() -> None:
    with pytest.raises(UnverifiableError, match="got no memory for rms_norm"):
        verify(zoo.OP, zoo.kernel(zoo.gets_no_memory), {}, PROBLEM, "cpu")


def test_a_problem_larger_than_the_memory_is_told_in_one_line() -> None:
    problem = zoo.OP.problem(f"m=1,n={10**20},x=fp32")  # torch adds a page of its own frames
    with pytest.raises(UnverifiableError, match="the reference of .* did not run: .*[Oo]verflow") as told:
        verify(zoo.OP, zoo.kernel(zoo.honest), {}, problem, "cpu")
    assert "\n" not in str(told.value).strip()


def test_arguments_are_made_once_for_many_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    trials, real = [], verifying.new_trial
    monkeypatch.setattr(verifying, "new_trial", lambda *given: trials.append(given) or real(*given))
    verifier, other = Verifier(), zoo.OP.problem("m=3,n=64,x=bf16")
    for problem, count in ((PROBLEM, 1), (PROBLEM, 1), (other, 2), (other, 2), (PROBLEM, 3)):
        assert verifier.verify(zoo.OP, zoo.kernel(zoo.honest), {}, problem, "cpu").ok and len(trials) == count


@pytest.mark.parametrize("function", zoo.WRONG, ids=lambda f: f.__name__)
def test_wrong_kernels_are_caught_with_kept_arguments_and_spoil_nothing(function) -> None:
    verifier = Verifier()
    assert verifier.verify(zoo.OP, zoo.kernel(zoo.honest), {}, PROBLEM, "cpu").ok
    assert not verifier.verify(zoo.OP, zoo.kernel(function), {}, PROBLEM, "cpu").ok
    assert verifier.verify(zoo.OP, zoo.kernel(zoo.honest), {}, PROBLEM, "cpu").ok


def test_nobody_is_blamed_for_what_another_one_spoilt() -> None:
    verifier = Verifier()
    assert verifier.verify(zoo.OP, zoo.kernel(zoo.honest), {}, PROBLEM, "cpu").ok
    verifier._trial.reference[0].mul_(2)
    assert verifier.verify(zoo.OP, zoo.kernel(zoo.honest), {}, PROBLEM, "cpu").ok


def test_a_kernel_that_breaks_its_device_is_wrong_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = Verifier()
    assert verifier.verify(zoo.OP, zoo.kernel(zoo.honest), {}, PROBLEM, "cpu").ok

    def dead(*arguments):
        raise UnverifiableError("no device answers")

    monkeypatch.setattr(verifying, "new_trial", dead)
    assert "no such instruction" in verifier.verify(zoo.OP, zoo.kernel(zoo.raises), {}, PROBLEM, "cpu").reason


NAN, INF, MOST = float("nan"), float("inf"), torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (NAN, NAN, True),
        (0.0, -0.0, True),
        (NAN, 0.0, False),
        (INF, MOST, False),
        (-INF, INF, False),
        (1.0, 1.0, True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_nan_is_no_zero_and_an_infinity_no_large_number(
    one: float, other: float, equal: bool, dtype: torch.dtype
) -> None:
    a, b = torch.tensor([1.0, one]).to(dtype), torch.tensor([1.0, other]).to(dtype)
    if dtype == torch.bfloat16 and other == MOST:
        b[1] = torch.finfo(dtype).max
    assert same_bits(a, b) == same_bits(b, a) == equal and metrics.exact(a, b) == (0.0 if equal else 1.0)
