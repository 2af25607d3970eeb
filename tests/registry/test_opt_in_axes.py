"""Opt-in axes: a kernel that does not name one in `supports` refuses every value of it but the default."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gristmill.kernel_registry import Axis, Kernel, Op, Problem, Tensor
from gristmill.kernel_registry.plugins import Plugin
from gristmill.kernel_registry.registry import Registry, default_registry, with_plugins

RMS_NORM = default_registry().op("rms_norm")
KERNEL = default_registry().kernel("rms_norm", "rms_norm_torch")


def with_gate() -> Op:
    """Returns rms_norm with an optional argument, whose axis is opt-in."""
    arguments = (*RMS_NORM.arguments, Tensor("gate", "n", dtype="fp32", optional=True))
    axes = (*RMS_NORM.axes, Axis("gate", "bool", "a factor per column", default=False, opt_in=True))
    return replace(RMS_NORM, arguments=arguments, axes=axes)


def kernel(name: str, **changes: object) -> Kernel:
    return replace(KERNEL, name=name, **changes)  # type: ignore[arg-type]


def refusals(registry: Registry, text: str) -> dict[str, str | None]:
    problem = registry.op("rms_norm").problem(text)
    return {each.name: each.accepts(problem) for each in registry.kernels_of("rms_norm")}


@pytest.mark.parametrize("op_first", [True, False], ids=["the operation first", "kernels first"])
def test_only_kernels_that_name_the_axis_take_its_values(op_first: bool) -> None:
    registry = Registry()
    kernels = [kernel("old"), kernel("new", supports=("gate",))]
    for spec in [with_gate(), *kernels] if op_first else [*kernels, with_gate()]:
        registry.add(spec)
    assert refusals(registry, "m=1,n=8") == {"old": None, "new": None}
    assert refusals(registry, "m=1,n=8,gate=true") == {"old": "does not support gate", "new": None}
    assert refusals(registry.copy(), "m=1,n=8,gate=true")["old"] == "does not support gate"


def test_what_a_kernel_refuses_besides_stays_refused() -> None:
    def accepts(problem: Problem) -> str | None:
        return "n is 8" if problem.integer("n") == 8 else None

    registry = Registry()
    for spec in (with_gate(), kernel("old", accepts=accepts)):
        registry.add(spec)
    assert refusals(registry, "m=1,n=8") == {"old": "n is 8"}
    assert refusals(registry, "m=1,n=9") == {"old": None}


def test_a_plugin_from_before_the_argument_refuses_it() -> None:
    registry = Registry()
    registry.add(with_gate())
    module = type("module", (), {"__name__": "plugin", "KERNEL": kernel("theirs")})
    extended = with_plugins(registry, [(Plugin("gristmill.kernels", "theirs", "plugin", "1.0"), module)])
    assert not extended.failures
    assert refusals(extended, "m=1,n=8,gate=true") == {"theirs": "does not support gate"}


def test_a_kernel_that_supports_an_unknown_axis_is_refused() -> None:
    registry = Registry()
    registry.add(with_gate())
    with pytest.raises(ValueError, match="kernel new supports gait: no opt-in axis of rms_norm"):
        registry.add(kernel("new", supports=("gait",)))
    with pytest.raises(ValueError, match="kernel new supports n: no opt-in axis"):
        registry.add(kernel("new", supports=("n",)))


def test_a_kernel_that_reads_what_is_not_derived_is_refused() -> None:
    factors = Tensor("factors", "n", optional=True, derived=True)
    registry = Registry()
    registry.add(replace(RMS_NORM, arguments=(*RMS_NORM.arguments, factors)))
    registry.add(kernel("new", reads=("factors",)))
    for name in ("weight", "facts"):
        with pytest.raises(ValueError, match=f"kernel other reads {name}: no derived argument of rms_norm"):
            registry.add(kernel("other", reads=(name,)))
