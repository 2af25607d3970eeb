"""Times and configurations that were measured with x in floats serve the same product of given codes."""

from __future__ import annotations

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


def spaces(kernel: Kernel, problem: Problem) -> list[Config]:
    assert kernel.space is not None
    return list(kernel.space(problem, TARGET))


def timing(problem: Problem, config: Config, us: float) -> Timing:
    return Timing(
        op="linear",
        kernel=KERNEL.name,
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
