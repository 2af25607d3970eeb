"""Determinism and batch invariance are measured correctly, on real kernels and on two that only declare them."""

from __future__ import annotations

import torch

from gristmill.autotune.place import place
from gristmill.autotune.properties import properties
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.requirement import Requirement
from tests.calls import positional

OP = default_registry().op("rms_norm")
PROBLEM = OP.problem("m=7,n=257,x=bf16")
STATE = {"calls": 0}


@positional
def wobbles(config, x, weight, eps, out):
    STATE["calls"] += 1
    out.copy_(OP.reference(x, weight, eps))
    out.view(torch.int16)[0, STATE["calls"] % 2] += 1


@positional
def looks_around(config, x, weight, eps, out):
    """Adds one unit in the last place to every row if there are many rows."""
    out.copy_(OP.reference(x, weight, eps))
    if len(x) > 16:
        out.view(torch.int16)[:, 3] += 1


def kernel(function) -> Kernel:
    return Kernel(
        op="rms_norm",
        name=function.__name__,
        provider="test",
        language="python",
        batch_invariant=True,
        target=f"{__name__}:{function.__name__}",
        requires=Requirement(),
    )


def measured_properties(spec: Kernel, op=OP, problem=PROBLEM):
    return properties(op, spec, lambda p: spec.config(p, place("cpu").target), problem, "cpu")


def test_what_is_declared_and_not_kept_is_said() -> None:
    actual = measured_properties(kernel(wobbles))
    assert actual.deterministic is False and "equal arguments gave different bits" in actual.broken[0]
    actual = measured_properties(kernel(looks_around))
    assert actual.deterministic and actual.batch_invariant is False
    assert actual.broken == ("declared batch invariant, but a row's bits depend on the rows around it",)


def test_what_real_kernels_declare_they_keep() -> None:
    registry = default_registry()
    for op_name in (
        "rms_norm",
        "linear",
        "combine",
        "grouped_linear",
        "paged_attention",
        "rotary_embedding",
        "grouped_topk",
    ):
        op = registry.op(op_name)
        spec = registry.kernel(op_name, f"{op_name}_cpu")
        actual = measured_properties(spec, op, op.problem(op.examples[2]))
        cannot = op_name in ("combine", "grouped_linear", "paged_attention")
        assert (
            actual.broken == ()
            and actual.deterministic
            and actual.batch_invariant is (None if cannot else True)
        ), op_name
