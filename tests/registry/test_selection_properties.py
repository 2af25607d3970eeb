"""Properties of selection, stores and problems that hold for any kernels, times and records."""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.autotune.store import dump
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.problem import DTYPES, Axis, AxisError
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import ALL_WEIGHT_SCHEMES
from gristmill.kernel_registry.select import Selection, select
from gristmill.kernel_registry.store import Store, Timing, Verification, distance, target_key
from gristmill.kernel_registry.target import Target
from tests.registry.fakes import BUILD, H200, OP, kernel, problem, verified

NAMES = [f"{word}_{end}" for word in ("ant", "bee", "cat", "dog", "eel") for end in ("cpu", "triton")]
H100 = Target.parse("h100")
SETTINGS = settings(max_examples=60, deadline=None)


@st.composite
def kernels(draw: Any) -> list[Kernel]:
    """Kernels with priorities, flags and, for some, an estimate."""
    kernels_drawn = []
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1, max_size=7)):
        estimate = draw(st.none() | st.integers(1, 99))
        kernels_drawn.append(
            kernel(
                name,
                priority=draw(st.integers(-2, 3)),
                deterministic=draw(st.booleans()),
                batch_invariant=draw(st.booleans()),
                auto=draw(st.integers(0, 3)) > 0,
                estimate=None if estimate is None else lambda p, t, us=estimate: float(us),
            )
        )
    return kernels_drawn


@st.composite
def worlds(draw: Any) -> tuple[list[Kernel], Store, Policy]:
    """Kernels, a store and a policy. The store verifies or refuses some kernels and has times of some, at
    this problem, near, far and on a sibling."""
    these = draw(kernels())
    store = Store()
    for k in these:
        outcome = draw(st.sampled_from((True, True, True, False, None)))
        if outcome is not None:
            verified(k, at=problem(), store=store, ok=outcome)
        for at in draw(st.lists(st.sampled_from((16, 12, 24, 32, 300)), max_size=2)):
            target = draw(st.sampled_from((H200, H200, H100)))
            store.add(
                Timing(
                    "mix",
                    k.name,
                    "",
                    {},
                    f"m={at},n=4096,k=4096",
                    target_key(target),
                    BUILD.key(),
                    float(draw(st.integers(1, 60))),
                )
            )
    patterns = st.lists(st.sampled_from([*NAMES, "*_cpu", "*_triton", "b*", "nothing"]), max_size=3).map(
        tuple
    )
    policy = Policy(
        pins=draw(
            st.just({}) | st.fixed_dictionaries({"mix": patterns}) | st.fixed_dictionaries({"*": patterns})
        ),
        exclude=draw(st.just(()) | patterns),
        strict=draw(st.booleans()),
        deterministic=draw(st.booleans()),
        batch_invariant=draw(st.booleans()),
    )
    return these, store, policy


def _choose(these: list[Kernel], store: Store, policy: Policy, foreign: bool = False) -> Selection:
    return select(OP, problem(), these, H200, BUILD, store, policy, foreign=foreign)


def _winner(selection: Selection) -> str | None:
    return None if selection.best is None else selection.best.kernel.name


@SETTINGS
@given(worlds(), st.randoms(use_true_random=False), st.booleans())
def test_ranking_is_a_total_order_that_knows_nothing_of_the_order_given(
    world, shuffle: random.Random, foreign: bool
) -> None:
    these, store, policy = world
    selection = _choose(these, store, policy, foreign)
    mixed = list(these)
    shuffle.shuffle(mixed)
    assert _choose(mixed, store, policy, foreign) == selection
    assert sorted(c.kernel.name for c in selection.candidates) == sorted(k.name for k in these)
    assert sum(c.verdict == "selected" for c in selection.candidates) <= 1


@SETTINGS
@given(worlds())
def test_every_verdict_has_its_reason_and_a_policy_never_lets_an_excluded_kernel_win(world) -> None:
    these, store, policy = world
    selection = _choose(these, store, policy)
    for c in selection.candidates:
        assert c.reasons or c.verdict in ("selected", "eligible")
        if c.verdict in ("selected", "eligible", "unverified"):
            assert policy.excludes(c.kernel.name) is None
            assert c.kernel.deterministic or not policy.deterministic
            assert c.kernel.batch_invariant or not policy.batch_invariant
            pinned = policy.rank("mix", c.kernel.name) is not None
            assert pinned or c.kernel.auto
            assert pinned or not (policy.strict and policy.pinned("mix"))
    if selection.best is not None:
        assert selection.best is selection.candidates[0] and selection.best.verdict in (
            "selected",
            "unverified",
        )


@SETTINGS
@given(worlds())
def test_removing_the_winner_promotes_the_next_and_others_keep_their_order(world) -> None:
    these, store, policy = world
    alive = [
        c.kernel.name
        for c in _choose(these, store, policy).candidates
        if c.verdict in ("selected", "eligible", "unverified")
    ]
    for removed in alive:
        rest = _choose([k for k in these if k.name != removed], store, policy)
        assert [
            c.kernel.name for c in rest.candidates if c.verdict in ("selected", "eligible", "unverified")
        ] == [n for n in alive if n != removed]


@SETTINGS
@given(worlds(), st.booleans())
def test_a_slower_candidate_never_changes_the_winner(world, measured: bool) -> None:
    """Slower means of a later class (measured, estimated, declared), or behind within the winner's class."""
    these, store, policy = world
    before = _choose(these, store, policy)
    if before.best is None:
        return
    best = before.best
    slow = kernel("zebra", priority=best.kernel.priority - 1, batch_invariant=True)
    verified(slow, at=problem(), store=store)
    if measured and best.source in ("measured", "near", "sibling"):
        us = (best.expected_us or 0.0) + 1.0
        store.add(Timing("mix", "zebra", "", {}, str(problem()), target_key(H200), BUILD.key(), us))
    assert _winner(_choose([*these, slow], store, policy)) == best.kernel.name


_text = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=12)
_number = st.floats(allow_nan=False, allow_infinity=False, min_value=0)
_config = st.dictionaries(_text, st.integers(-5, 500) | st.booleans() | _text, max_size=3)


@SETTINGS
@given(
    st.lists(
        st.builds(Verification, *[_text] * 7, ok=st.booleans(), error=st.none() | _number, reason=_text),
        max_size=6,
    ),
    st.lists(
        st.builds(
            Timing,
            op=_text,
            kernel=_text,
            code=_text,
            config=_config,
            problem=_text,
            target=_text,
            toolchain=_text,
            us=_number,
            samples=st.lists(_number, max_size=3).map(tuple),
        ),
        max_size=6,
    ),
)
def test_a_store_comes_back_from_its_text(verifications: list[Verification], timings: list[Timing]) -> None:
    store = Store()
    for record in (*verifications, *timings):
        store.add(record)
        store.add(record)
    parsed = Store.parse(json.loads(dump(store)), "text")
    assert parsed.verifications == store.verifications
    assert {t.key: t for t in parsed.timings} == {t.key: t for t in store.timings}
    assert dump(parsed) == dump(store)


def _values(axis: Axis) -> st.SearchStrategy[Any]:
    if axis.kind == "int":
        return st.integers(axis.minimum, 1 << 33)
    if axis.kind == "float":
        return st.floats(allow_nan=False, allow_infinity=False, width=32)
    if axis.kind == "bool":
        return st.booleans()
    if axis.kind == "dtype":
        return st.sampled_from(axis.choices or DTYPES)
    if axis.kind == "flags":
        return st.lists(st.sampled_from(axis.choices), unique=True).map(lambda f: "+".join(f) or "none")
    if axis.kind == "scheme":
        return st.sampled_from(
            [*ALL_WEIGHT_SCHEMES, "fp8_block.fp8_g128", "int8_ch.int8_token", "nvfp4.nvfp4"]
        )
    return st.sampled_from(axis.choices)


@pytest.mark.parametrize("op", default_registry().ops.values(), ids=lambda op: op.name)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_problems_come_back_from_their_text(op: Op, data: st.DataObject) -> None:
    problem = op.problem(data.draw(st.sampled_from(op.examples)))
    for axis in op.axes:
        with contextlib.suppress(AxisError):  # a value that does not fit the others is left out
            problem = op.problem({**problem.as_dict(), axis.name: data.draw(_values(axis), label=axis.name)})
    assert op.problem(str(problem)) == problem and hash(op.problem(str(problem))) == hash(problem)
    static = op.static(problem)
    assert op.problem(str(static)) == static
    assert all(static[a.name] == problem[a.name] for a in op.axes if not a.dynamic)
    assert distance(problem, problem, op.dynamic) == 0
    if op.bucket is not None:
        assert op.at_bucket(static, 64).integer(op.bucket) == 64 and not op.at_bucket(static, 64).open_axes


@SETTINGS
@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 1 << 20)), min_size=3, max_size=3))
def test_distance_is_symmetric_and_keeps_the_triangle(sizes: list[tuple[int, int]]) -> None:
    a, b, c = (OP.problem({"m": m, "n": n, "k": 128}) for m, n in sizes)

    def far(first: Any, second: Any) -> float:
        return distance(first, second, OP.dynamic)

    assert far(a, b) == pytest.approx(far(b, a)) and far(a, c) <= far(a, b) + far(b, c) + 1e-9
