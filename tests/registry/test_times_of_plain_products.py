"""Times and configurations of a product that were measured with x in floats, or with nothing after it, serve the same one of given codes, and
with an epilogue."""

from __future__ import annotations

from pathlib import Path

import pytest

from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store, Timing, target_key
from gristmill.kernel_registry.target import Target
from gristmill.kernel_registry.times import Times

TARGET, BUILD = Target.parse("sm_90"), Build()
REGISTRY = default_registry()
OP, KERNEL = REGISTRY.op("linear"), REGISTRY.kernel("linear", "linear_w8a8_sm90")
FLOATS = OP.problem("m=64,n=4096,k=7168,w=fp8_block.fp8_g128")
CODES = FLOATS.with_values(codes=True)


GEMM = REGISTRY.kernel("linear", "linear_w4a16_gemm_ws_sm90")
TORCH = REGISTRY.kernel("linear", "linear_torch")
PLAIN = OP.problem("m=256,n=28672,k=4096,w=int4_g128")
GATED = PLAIN.with_values(epilogue="silu_mul")


def spaces(kernel: Kernel, problem: Problem) -> list[Config]:
    assert kernel.space is not None
    return list(kernel.space(problem, TARGET))


def timing(problem: Problem, config: Config, us: float, kernel: Kernel = KERNEL) -> Timing:
    return Timing(
        op="linear",
        kernel=kernel.name,
        code="",
        problem=str(problem),
        config=dict(config),
        target=target_key(TARGET),
        toolchain=BUILD.key(),
        us=us,
        timing="",
    )


def times(problem: Problem, *records: Timing) -> Times:
    store = Store()
    for record in records:
        store.add(record)
    return Times(OP, problem, TARGET, BUILD, store)


def test_the_configuration_of_floats_serves_codes() -> None:
    tuned = spaces(KERNEL, FLOATS)[5]
    assert tuned != KERNEL.config(CODES, TARGET)
    found = times(CODES, timing(FLOATS, tuned, 14.0))
    assert found.config(KERNEL) == tuned
    expected = found.expected(KERNEL)
    assert KERNEL.estimate is not None and expected is not None
    ratio = KERNEL.estimate(CODES, TARGET) / KERNEL.estimate(FLOATS, TARGET)  # type: ignore[operator]
    us, source = expected
    assert us == pytest.approx(14.0 * ratio) and ratio < 1 and source == "near"
    assert [kind for _, _, kind in found.evidence(KERNEL)] == ["near"]


def test_times_of_codes_come_first_however_near_others_are() -> None:
    first, second = spaces(KERNEL, FLOATS)[4:6]
    near = CODES.with_values(m=96)
    found = times(CODES, timing(FLOATS, first, 1.0), timing(near, second, 50.0))
    assert found.config(KERNEL) == second
    exact = times(CODES, timing(FLOATS, first, 1.0), timing(CODES, second, 13.0))
    assert exact.config(KERNEL) == second and exact.expected(KERNEL) == (13.0, "measured")


def test_nothing_serves_the_other_way_round_or_another_product() -> None:
    tuned = spaces(KERNEL, FLOATS)[5]
    assert times(FLOATS, timing(CODES, tuned, 14.0)).config(KERNEL) is None
    other = CODES.with_values(n=4224)
    found = times(other, timing(FLOATS, tuned, 14.0))
    assert found.config(KERNEL) is None and found.expected(KERNEL) is not None
    unknown = {**tuned, "rows": 3}
    assert times(CODES, timing(FLOATS, unknown, 14.0)).config(KERNEL) is None


def test_the_configuration_without_an_epilogue_serves_one() -> None:
    tuned = spaces(GEMM, PLAIN)[7]
    assert tuned != GEMM.config(GATED, TARGET)
    found = times(GATED, timing(PLAIN, tuned, 80.0, GEMM))
    assert found.config(GEMM) == tuned and found.expected(GEMM) == (80.0, "near")
    measured = times(
        GATED, timing(PLAIN, tuned, 80.0, GEMM), timing(GATED, spaces(GEMM, GATED)[3], 90.0, GEMM)
    )
    assert measured.config(GEMM) == spaces(GEMM, GATED)[3]
    assert measured.expected(GEMM) == (90.0, "measured")
    assert times(PLAIN, timing(GATED, tuned, 80.0, GEMM)).config(GEMM) is None


def test_a_record_that_lacks_one_thing_comes_before_one_that_lacks_two() -> None:
    both = CODES.with_values(epilogue="bias")
    first, second, third = spaces(KERNEL, both)[4:7]
    floats, none = both.with_values(codes=False), both.with_values(epilogue="none")
    records = timing(FLOATS, first, 1.0), timing(none, second, 2.0), timing(floats, third, 3.0)
    assert times(both, *records).config(KERNEL) == third
    assert times(both, *records[:2]).config(KERNEL) == second
    assert times(both, records[0]).config(KERNEL) == first


def test_only_a_model_of_the_kernel_says_what_an_epilogue_takes() -> None:
    """A library's product without the launch that follows it would look faster than it is."""
    dense = OP.problem("m=64,n=4096,k=4096,w=bf16")
    gated = dense.with_values(epilogue="silu_mul")
    assert TORCH.estimate is None
    record = timing(dense, TORCH.config(dense, TARGET), 9.0, TORCH)
    assert times(dense, record).expected(TORCH) == (9.0, "measured")
    assert times(gated, record).expected(TORCH) is None


def test_gate_and_up_of_a_model_run_what_was_measured_on_this_device() -> None:
    """Llama-3-8B in int4 on an H200: the shipped times are of products with nothing after them."""
    target = Target.parse("h200")
    store = Store.read_over_shipped(Path("no such file"))
    for m, kernel in ((1, "linear_w4a16_decode_sm90"), (256, GEMM.name)):
        plain, gated = (problem.with_values(m=m) for problem in (PLAIN, GATED))
        best = min(
            (
                timing
                for _, timings in store.alike(OP, target_key(target), plain)
                for timing in timings
                if timing.problem == str(plain)
            ),
            key=lambda timing: timing.us,
        )
        assert best.kernel == kernel
        found = Times(OP, gated, target, BUILD, store)
        assert found.config(REGISTRY.kernel("linear", kernel)) == best.config
