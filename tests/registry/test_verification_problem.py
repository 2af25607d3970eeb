"""The problem that verifies a configuration: small, and one that the configuration fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.select import select
from gristmill.kernel_registry.store import Store, Timing, target_key
from tests.registry.fakes import BUILD, H200, OP, kernel, problem


def cut(whole: Problem) -> Problem:
    n, k = whole.integers("n", "k")
    return whole.with_values(m=min(whole.integer("m"), 257), n=256 + n % 256, k=256 + k % 256)


CUT = replace(OP, shrink=cut)


def least(axis: str) -> object:
    """A kernel whose configurations need a size of at least `least` on an axis."""

    def misfit(at: Problem, config: Config) -> str | None:
        wanted = int(config["least"])
        return None if at.integer(axis) >= wanted else f"needs {axis} of {wanted}, not {at.integer(axis)}"

    return kernel("a", misfit=misfit)


@pytest.mark.parametrize(
    ("axis", "wanted", "expected"),
    [
        ("k", 0, "m=257,n=300,k=384"),
        ("k", 384, "m=257,n=300,k=384"),
        ("k", 385, "m=257,n=300,k=896"),
        ("k", 897, "m=257,n=300,k=1408"),
        ("n", 1000, "m=257,n=1324,k=384"),
        ("k", 4224, "m=257,n=300,k=4224"),
        ("m", 258, "m=769,n=300,k=384"),
        ("m", 5000, "m=5000,n=300,k=384"),
    ],
)
def test_one_size_grows_as_far_as_the_configuration_needs(axis: str, wanted: int, expected: str) -> None:
    whole = OP.problem("m=5000,n=8236,k=4224")
    small = CUT.verification(whole, least(axis), {"least": wanted})
    assert str(small) == expected
    for name in ("n", "k"):
        assert small.integer(name) % 256 == whole.integer(name) % 256
    assert CUT.verification(small, least(axis), {"least": wanted}) == small


def test_a_kernel_that_accepts_no_smaller_problem_is_verified_on_the_whole_one() -> None:
    whole = OP.problem("m=5000,n=8236,k=4224")
    picky = kernel("a", accepts=lambda at: None if at == whole else "takes one problem")
    assert CUT.verification(whole, picky, {}) == whole


def test_growing_keeps_to_problems_that_the_operation_has() -> None:
    """Where a rule of the operation forbids the sizes between, the whole one is left."""
    whole = OP.problem("m=64,n=256,k=4224")
    ruled = replace(CUT, check=lambda at: None if at["k"] in (384, 1408, 4224) else "no such size")
    assert str(ruled.verification(whole, least("k"), {"least": 385})) == "m=64,n=256,k=1408"


def test_a_tuned_configuration_that_does_not_fit_a_near_size_is_not_tried() -> None:
    def misfit(at: Problem, config: Config) -> str | None:
        most = int(config.get("most", 64))
        return None if at.integer("m") <= most else f"made for {most} rows"

    tuned = kernel("a", misfit=misfit)
    store = Store()
    for m, most in ((16, 16), (32, 32)):
        at = str(problem(f"m={m},n=4096,k=4096"))
        store.add(Timing("mix", "a", "", {"most": most}, at, target_key(H200), BUILD.key(), float(m)))

    def config(m: int) -> Config | None:
        at = problem(f"m={m},n=4096,k=4096")
        return select(OP, at, (tuned,), H200, BUILD, store, Policy()).require().config

    assert config(16) == {"most": 16}
    assert config(20) == {"most": 32}, "the nearest one that fits"
    assert config(33) == {}, "the default one"
