"""Grouped linear in CUDA C++ for Hopper over frag16 tiles (frag16_sm90/grouped_ws.cuh)."""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.moe.grouped_linear.frag16_sm90 import shapes


def accepts(problem: Problem) -> str | None:
    """None, or the reason why not."""
    if problem["act_order"]:
        return "takes no weights with act-order"
    beside = [flag for flag in problem.flags("epilogue") if flag != "silu_mul"]
    if beside:
        return f"its epilogue is silu_mul alone, without {' and '.join(beside)}"
    scheme, silu_mul = QuantScheme.parse(problem.text("w")), "silu_mul" in problem.flags("epilogue")
    e, n, k = problem.integers(*"enk")
    return shapes.refusal(scheme, problem.text("x"), e, n, k, silu_mul)


def _form(problem: Problem) -> shapes.Format:
    form = shapes.format_of(QuantScheme.parse(problem.text("w")))
    if form is None:
        raise ValueError(f"grouped_linear_sm90: {accepts(problem)}")
    return form


def config(problem: Problem, target: Target) -> Config:
    """The shape of a CTA for the rows that an expert has on average."""
    silu_mul, processors = "silu_mul" in problem.flags("epilogue"), target.multiprocessors or 132
    m, e, n, k = problem.integers(*"menk")
    shape = shapes.shape_for(m, e, n, k, silu_mul, processors)
    return shapes.config_of(_form(problem), shape, processors)


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Every shape."""
    silu_mul, processors = "silu_mul" in problem.flags("epilogue"), target.multiprocessors or 132
    for shape in shapes.shapes_for(problem.integer("k"), silu_mul):
        yield shapes.config_of(_form(problem), shape, processors)


def misfit(problem: Problem, config: Config) -> str | None:
    """None, or why the shape of a configuration does not multiply the weights of `problem`."""
    return shapes.misfit_of(config, "", problem.integer("k"), "silu_mul" in problem.flags("epilogue"))


KERNEL = Kernel(
    op="grouped_linear",
    name="grouped_linear_sm90",
    provider="gristmill",
    language="cuda",
    target="gristmill.kernels.moe.grouped_linear.frag16_sm90._launch:launch",
    requires=Requirement(features=(frozenset({"wgmma", "tma"}),), vendors=("nvidia",), code="cuda:sm_90a"),
    summary="persistent CTAs over a list of tiles made on the device; 4-bit weights as the register operand of wgmma",
    accepts=accepts,
    config=config,
    space=space,
    misfit=misfit,
    layouts=("w4_frag16_v1", "f4_frag16_v1"),
    examples=(
        "m=19,e=4,n=96,k=256,w=int4_g128,epilogue=silu_mul,gather=3",
        "m=257,e=5,n=200,k=640,x=fp16,w=int4_g128",
        "m=33,e=3,n=80,k=96,w=mxfp4,gather=2",
    ),
    waits=True,
    triggers=True,
    priority=108,
    proven="sm_90: H200",
)
