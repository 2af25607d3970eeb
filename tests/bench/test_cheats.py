"""Cheating kernels are caught while they are timed, each for the right reason; honest ones pass."""

from __future__ import annotations

import pytest
import torch

from gristmill.autotune.candidate import Candidate, WrongResultError
from gristmill.autotune.rotation import Rotation
from gristmill.autotune.verify import verify
from gristmill.kernel_registry.registry import default_registry
from tests.bench import cheats

PROBLEM = cheats.OP.problem("m=64,n=2048,x=bf16")


@pytest.fixture(autouse=True)
def clean():
    cheats.leave()
    yield
    cheats.leave()


def timed(function) -> Candidate:
    kernel = cheats.kernel(function)
    candidate = Candidate(kernel, {}, Rotation(cheats.OP, kernel, PROBLEM, "cpu"))
    for _ in range(6):
        candidate.sample()
    candidate.audit()
    for _ in range(
        4 * len(candidate.rotation.sets) // candidate.calls
    ):  # enough rounds for a cache to pay off
        candidate.sample()
    candidate.conclude()
    return candidate


@pytest.mark.parametrize("function", cheats.CHEATS, ids=lambda f: f.__name__)
def test_a_cheat_is_caught(function) -> None:
    with pytest.raises(WrongResultError, match=cheats.CHEATS[function]):
        timed(function)


def test_an_honest_kernel_is_not() -> None:
    candidate = timed(cheats.honest)
    assert candidate.error == 0.0 and candidate.repeatable and candidate.timing == "eager,cold"


PATIENT = [f for f in cheats.CHEATS if "thread" not in f.__name__ and "bits" not in f.__name__]


@pytest.mark.parametrize("function", PATIENT, ids=lambda f: f.__name__)
def test_verification_alone_would_not_have_caught_it(function) -> None:
    """Verification alone does not catch these cheats, which is why audits exist."""
    assert verify(cheats.OP, cheats.kernel(function), {}, PROBLEM, "cpu").ok


def test_equal_addresses_get_other_content_and_poison() -> None:
    rotation = Rotation(cheats.OP, cheats.kernel(cheats.honest), PROBLEM, "cpu", hot=True)
    first_call = rotation.next()
    before = first_call.x.clone()
    rotation.refresh()
    second_call = rotation.next()
    assert second_call.x.data_ptr() == first_call.x.data_ptr() and not torch.equal(second_call.x, before)
    assert bool(second_call.out.isnan().all()) and bool(rotation.sets[0].guards[0].flat.isnan().all())


@pytest.mark.parametrize("op_name", sorted(default_registry().ops))
def test_every_operation_can_be_audited(op_name: str) -> None:
    """The honest C++ kernel of each operation passes, or torch's where it has none: contents of two seeds fit the same memory, in-place
    arguments included."""
    op = default_registry().op(op_name)
    names = {kernel.name for kernel in default_registry().kernels_of(op_name)}
    native = f"{op_name}_cpu" in names and op.ranks is None
    kernel = default_registry().kernel(op_name, f"{op_name}_{'cpu' if native else 'torch'}")
    problem = next(p for p in map(op.problem, op.examples[1:]) if kernel.accepts(p) is None)
    from gristmill.autotune.place import place

    candidate = Candidate(
        kernel, kernel.config(problem, place("cpu").target), Rotation(op, kernel, problem, "cpu")
    )
    for _ in range(3):
        candidate.sample()
    candidate.conclude()
