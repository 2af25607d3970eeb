"""Plans: buckets, layouts within the memory that a policy allows, and digests."""

from __future__ import annotations

import pytest

from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.plan import BUCKETS, Plan, bucket_index, bucket_sizes, make_plan, more_memory
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.select import NoKernelError, select
from gristmill.kernel_registry.store import Store
from gristmill.kernel_registry.target import Target
from tests.registry.fakes import BUILD, H200, OP, kernel, layout, problem, timed, verified

STATIC = OP.static(problem())


def plan(kernels, layouts, store: Store, policy: Policy | None = None) -> Plan:
    policy = policy or Policy()
    return make_plan(
        OP,
        STATIC,
        {x.name: x for x in layouts},
        policy,
        lambda p, chosen: select(OP, p, kernels, H200, BUILD, store, policy, layouts=chosen),
    )


def times(store: Store, name: str, us) -> Store:
    for size in bucket_sizes():
        timed(store, name, us(size), at=problem(f"m={size},n=4096,k=4096"))
    return store


@pytest.mark.parametrize(
    ("size", "bucket"),
    [
        (1, 1),
        (2, 2),
        (3, 4),
        (4, 4),
        (5, 8),
        (64, 64),
        (65, 80),
        (80, 80),
        (130, 160),
        (256, 256),
        (257, 320),
        (512, 512),
        (513, 1024),
        (1024, 1024),
        (1025, 2048),
        (4095, 4096),
        (4096, 4096),
        (4097, None),
        (10**6, None),
    ],
)
def test_a_size_falls_in_the_smallest_bucket_that_holds_it(size, bucket):
    assert (*BUCKETS, None)[bucket_index(size)] == bucket


def test_one_layout_serves_all_buckets_with_the_best_kernel_of_each():
    small, large = kernel("small", layouts=("one_v1",)), kernel("large", layouts=("one_v1",))
    store = times(times(verified(small, large), "small", lambda m: m), "large", lambda m: 100.0)
    planned = plan([small, large], [layout("one_v1", 1.0)], store)
    assert [e.kernel for e in planned.entries] == ["small"] * 9 + ["large"] * 14
    assert planned.layouts == ("one_v1",) and {e.source for e in planned.entries} == {"measured"}


def test_two_layouts_are_kept_only_when_memory_allows_and_they_pay():
    a, b = kernel("a", layouts=("one_v1",)), kernel("b", layouts=("two_v1",))
    store = times(times(verified(a, b), "a", lambda m: m), "b", lambda m: 100.0)
    both = [layout("one_v1", 1.0), layout("two_v1", 1.0)]
    assert len(plan([a, b], both, store, Policy(weight_memory=1.05)).layouts) == 1
    rich = plan([a, b], both, store, Policy(weight_memory=2.1))
    assert (
        rich.layouts == ("one_v1", "two_v1")
        and rich.entries[0].kernel == "a"
        and rich.entries[-1].kernel == "b"
    )
    useless = times(times(verified(a, b), "a", lambda m: m), "b", lambda m: m + 1.0)
    assert plan([a, b], both, useless, Policy(weight_memory=2.1)).layouts == ("one_v1",)


def test_what_more_memory_buys_is_told_when_it_pays():
    a, b = kernel("a", layouts=("one_v1",)), kernel("b", layouts=("two_v1",))
    both = {x.name: x for x in (layout("one_v1", 1.0), layout("two_v1", 1.5))}

    def suggestion(store, policy=None):
        def peek(p, chosen):
            return select(OP, p, [a, b], H200, BUILD, store, policy or Policy(), layouts=chosen)

        return more_memory(
            OP, STATIC, both, policy or Policy(), peek, plan([a, b], both.values(), store, policy)
        )

    faster = times(times(verified(a, b), "a", lambda m: 100.0), "b", lambda m: 50.0 if m > 1 else 200.0)
    actual = suggestion(faster)
    assert (
        actual.layouts == ("one_v1", "two_v1")
        and actual.memory == pytest.approx(2.5)
        and actual.faster == pytest.approx(2 ** (13 / 14))
    )
    assert suggestion(faster, Policy(weight_memory=3.0)) is None, "the bound keeps nothing out"
    assert suggestion(times(times(verified(a, b), "a", lambda m: 100.0), "b", lambda m: 99.9)) is None, (
        "a thousandth is not worth a word"
    )
    ranked = kernel("b", layouts=("two_v1",), priority=99)
    untimed = verified(a, ranked)

    def untimed_peek(p, chosen):
        return select(OP, p, [a, ranked], H200, BUILD, untimed, Policy(), layouts=chosen)

    unknown = more_memory(OP, STATIC, both, Policy(), untimed_peek, plan([a, ranked], both.values(), untimed))
    assert unknown.layouts == ("two_v1",) and unknown.faster is None


def test_the_best_layout_is_the_one_with_the_least_total_time():
    a, b = kernel("a", layouts=("one_v1",)), kernel("b", layouts=("two_v1",))
    store = times(times(verified(a, b), "a", lambda m: 50.0), "b", lambda m: 10.0 if m < 2048 else 60.0)
    assert plan([a, b], [layout("one_v1", 1.0), layout("two_v1", 1.0)], store).layouts == ("two_v1",)


def test_a_pinned_kernel_decides_the_layout_however_fast_another_one_is():
    a, b = kernel("a", layouts=("one_v1",)), kernel("b", layouts=("two_v1",))
    store = times(times(verified(a, b), "a", lambda m: 1.0), "b", lambda m: 100.0)
    both = [layout("one_v1", 1.0), layout("two_v1", 1.0)]
    assert plan([a, b], both, store).layouts == ("one_v1",)
    assert plan([a, b], both, store, Policy(pins={"mix": ("b",)})).layouts == ("two_v1",)
    assert plan([a, b], both, store, Policy(pins={"*": ("b", "a")})).layouts == ("two_v1",)
    assert plan([a, b], both, store, Policy(pins={"mix": ("absent",)})).layouts == ("one_v1",)


def test_a_layout_past_the_memory_bound_is_no_choice_unless_nothing_else_is_there():
    a, b = kernel("a", layouts=("one_v1",), priority=1), kernel("wide", layouts=("wide_v1",), priority=9)
    planned = plan([a, b], [layout("one_v1", 1.0), layout("wide_v1", 4.0)], verified(a, b))
    assert planned.layouts == ("one_v1",)
    assert plan([b], [layout("wide_v1", 4.0)], verified(b)).layouts == ("wide_v1",)
    with pytest.raises(
        NoKernelError, match=r"layout wide_v1 takes \d+ bytes; the policy's weight_memory 1.05 allows"
    ):
        plan([b], [layout("one_v1", 1.0), layout("wide_v1", 4.0)], verified(b))


def test_a_plan_that_no_kernel_can_fill_lists_the_reasons():
    picky = kernel(
        "picky", layouts=("one_v1",), accepts=lambda p: "m at most 8" if p.integer("m") > 8 else None
    )
    with pytest.raises(NoKernelError, match="m at most 8"):
        plan([picky], [layout("one_v1", 1.0)], verified(picky))


def test_equal_plans_have_equal_digests_and_others_do_not():
    a, b = kernel("a", layouts=("one_v1",)), kernel("b", layouts=("one_v1",), priority=3)
    one = [layout("one_v1", 1.0)]
    assert plan([a], one, verified(a)).digest() == plan([a], one, verified(a)).digest()
    assert plan([a], one, verified(a)).digest() != plan([a, b], one, verified(a, b)).digest()


def test_layouts_that_cannot_win_are_not_resolved():
    a, b = kernel("a", layouts=("one_v1",), priority=100), kernel("b", layouts=("two_v1",))
    both, resolved = {x.name: x for x in (layout("one_v1", 1.0), layout("two_v1", 1.0))}, []
    store = verified(a, b)

    def peek(p, chosen):
        return select(OP, p, [a, b], H200, BUILD, store, Policy(), layouts=chosen)

    def resolve(p, chosen):
        resolved.append(chosen)
        return peek(p, chosen)

    planned = make_plan(OP, STATIC, both, Policy(), resolve, peek=peek)
    assert planned.layouts == ("one_v1",) and set(resolved) == {frozenset({"one_v1"})}
    assert planned == make_plan(OP, STATIC, both, Policy(), peek)


def test_a_plan_is_for_sizes_of_buckets():
    with pytest.raises(ValueError, match="100 is no bucket's size"):
        make_plan(OP, STATIC, {"one_v1": layout("one_v1", 1.0)}, Policy(), lambda p, c: None, sizes=(1, 100))


@pytest.mark.parametrize(
    ("name", "shape", "last"),
    [("grouped_linear", "m=1,e=8,n=64,k=64", 32768), ("linear", "m=1,n=64,k=64", 8192)],
)
def test_what_the_last_bucket_is_selected_at(name: str, shape: str, last: int):
    """Rows sorted by expert are as many as tokens times experts of a token: what suits 8,192 of them would run for 32,768."""
    op = default_registry().op(name)
    static = op.static(op.problem(shape))
    assert [op.at_bucket(static, size).integer("m") for size in bucket_sizes()[-2:]] == [4096, last]


@pytest.mark.parametrize("op", default_registry().ops.values(), ids=lambda op: op.name)
def test_every_operation_can_be_planned(op):
    registry = default_registry()
    for text in op.bench:
        static = op.static(op.problem(text))
        selection = make_plan(
            op,
            static,
            registry.layouts,
            Policy(),
            lambda p, chosen: select(
                op,
                p,
                registry.kernels_of(op.name),
                H200,
                BUILD,
                Store(),
                Policy(),
                layouts=chosen,
                foreign=True,
            ),
        )
        assert len(selection.entries) == len(bucket_sizes()) and selection.entries[-1].m_max is None


@pytest.mark.parametrize("n", [1, 8, 15, 17, 257])
@pytest.mark.parametrize("scheme", ["bf16", "int4_g128", "fp8_block", "mxfp4", "nvfp4"])
def test_padding_of_few_rows_does_not_rule_a_layout_out(scheme: str, n: int):
    """A weight with fewer rows than a block of cpu_rows16_v1 still uses that layout, with our C++ kernel."""
    registry = default_registry()
    cpu, policy = Target.parse("cpu:avx2"), Policy()
    build = Build.of({"torch": "2.13.0"}, cpu_levels=("base", "avx2"))
    op = registry.op("linear")
    selection = make_plan(
        op,
        op.problem(f"n={n},k=4096,w={scheme}"),
        registry.layouts,
        policy,
        lambda p, chosen: select(
            op, p, registry.kernels_of("linear"), cpu, build, Store(), policy, layouts=chosen
        ),
    )
    assert {entry.kernel for entry in selection.entries} == {"linear_cpu"}
