"""Matrix products of other libraries as choices of a plan: by measured time, within the bound on memory, in
their own layouts."""

from __future__ import annotations

import pytest

from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.plan import bucket_sizes, make_plan, readable
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.select import select
from gristmill.kernel_registry.store import Store, Timing, target_key
from gristmill.kernel_registry.target import Target
from tests.registry.selection_cases import BUILDS

REGISTRY = default_registry()
OP = REGISTRY.op("linear")
KERNELS = REGISTRY.kernels_of("linear")
H200 = Target.parse("h200")
FRAG16 = ("w4_frag16_v1", "f4_frag16_v1", "w8_frag16_v1")


def plan(scheme: str, build: str, us: dict[str, float], policy: Policy | None = None):
    """Returns the plan of a layer whose kernels were all measured: `us` for the named ones, 100 µs for the
    others."""
    policy, store = policy or Policy(), Store()
    static = OP.static(OP.problem(f"n=4096,k=4096,w={scheme}"))
    for size in bucket_sizes():
        problem = OP.at_bucket(static, size)
        for k in KERNELS:
            if not k.requires.check_hardware(H200) and k.accepts(problem) is None:
                store.add(
                    Timing(
                        op="linear",
                        kernel=k.name,
                        code="",
                        config=dict(k.config(problem, H200)),
                        problem=str(problem),
                        target=target_key(H200),
                        toolchain=BUILDS[build].key(),
                        us=us.get(k.name, 100.0),
                        timing="graph,cold",
                    )
                )
    layouts = readable(KERNELS, REGISTRY.layouts, H200, BUILDS[build])
    return make_plan(
        OP,
        static,
        layouts,
        policy,
        lambda p, chosen: select(
            OP, p, KERNELS, H200, BUILDS[build], store, policy, layouts=chosen, foreign=True
        ),
    )


@pytest.mark.parametrize(
    "scheme, build, kernel, layout",
    [
        ("int4_g128", "humming", "linear_humming", "humming_v1"),
        ("nvfp4", "humming", "linear_humming", "humming_v1"),
        ("int4_g128", "cuda", "linear_int4_torch", "tinygemm_v1"),
        ("nvfp4", "sm90a", "linear_dequant_frag16", "f4_frag16_v1"),
        ("fp8_block.fp8_g128", "deepgemm", "linear_deepgemm", "plain_v1"),
    ],
)
def test_the_fastest_is_chosen_whoever_wrote_it(scheme: str, build: str, kernel: str, layout: str) -> None:
    planned = plan(scheme, build, {kernel: 5.0})
    assert planned.layouts == (layout,) and {entry.kernel for entry in planned.entries} == {kernel}
    slow = plan(scheme, build, {kernel: 500.0})
    assert kernel not in {entry.kernel for entry in slow.entries}


def test_a_library_that_is_not_installed_is_no_choice() -> None:
    assert plan("int4_g128", "cuda", {"linear_humming": 1.0}).layouts != ("humming_v1",)
    without = plan("fp8_block.fp8_g128", "sm90a", {"linear_deepgemm": 1.0})
    assert "linear_deepgemm" not in {entry.kernel for entry in without.entries}


def test_deepgemm_runs_only_where_a_time_says_so() -> None:
    """Without a time of its own it comes behind what the cost model ranks, however close other sizes were measured."""
    build, store = BUILDS["deepgemm"], Store()
    ours, theirs = (REGISTRY.kernel("linear", f"linear_{name}") for name in ("w8a8_sm90", "deepgemm"))
    problem = OP.problem("m=4096,n=24576,k=1536,w=fp8_block.fp8_g128")

    def best(problem: Problem) -> str:
        return select(OP, problem, KERNELS, H200, build, store, Policy(), foreign=True).require().kernel.name

    def measure(kernel: Kernel, us: float, problem: Problem = problem) -> None:
        config = dict(kernel.config(problem, H200))
        store.add(Timing("linear", kernel.name, "", config, str(problem), target_key(H200), build.key(), us))

    assert best(problem) == ours.name
    measure(ours, 314.0)
    measure(theirs, 320.0)
    assert best(problem) == ours.name
    measure(theirs, 260.0)
    assert best(problem) == theirs.name == best(problem.with_values(codes=True))
    assert best(problem.with_values(epilogue="bias")) == ours.name  # a launch more, which no time has
    assert best(problem.with_values(m=64)) == ours.name


def test_the_bound_on_memory_holds_for_them_too() -> None:
    """tinygemm stores 4 bytes per group where other layouts store 2: 11 % more for groups of 32."""
    assert plan("int4_g32", "cuda", {"linear_int4_torch": 5.0}).layouts != ("tinygemm_v1",)
    assert plan("int4_g32", "cuda", {"linear_int4_torch": 5.0}, Policy(weight_memory=1.12)).layouts == (
        "tinygemm_v1",
    )


@pytest.mark.parametrize("layout", FRAG16)
def test_dequantize_and_multiply_is_a_candidate_of_every_frag16_scheme(layout: str) -> None:
    kernel = REGISTRY.kernel("linear", "linear_dequant_frag16")
    for scheme in REGISTRY.layout(layout).schemes:
        for more in (
            "",
            ",epilogue=bias+residual+silu_mul",
            *((",act_order=true",) if QuantScheme.parse(scheme).group_size else ()),
        ):
            problem = OP.problem(f"m=4096,n=4096,k=4096,w={scheme}{more}")
            assert kernel.accepts(problem) is None
        chosen = select(
            OP,
            problem,
            KERNELS,
            H200,
            BUILDS["sm90a"],
            Store(),
            Policy(),
            layouts=frozenset({layout}),
            foreign=True,
        )
        assert "linear_dequant_frag16" in {
            c.kernel.name for c in chosen.candidates if c.verdict == "unverified"
        }
