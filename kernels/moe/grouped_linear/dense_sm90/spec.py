"""Grouped linear of dense weights in CUDA C++ for Hopper (dense_sm90/product.cuh)."""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target
from gristmill.kernels.moe.grouped_linear.dense_sm90 import shapes


def accepts(problem: Problem) -> str | None:
    """None, or the reason why not."""
    if problem["act_order"]:
        return "takes no weights with act-order"
    if problem["gather"]:
        return "takes rows sorted by expert, and gathers none"
    e, n, k = problem.integers(*"enk")
    silu_mul = "silu_mul" in problem.flags("epilogue")
    return shapes.refusal(problem.text("w"), problem.text("x"), e, n, k, silu_mul)


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Every choice, the fastest expected first."""
    processors = target.multiprocessors or shapes.PROCESSORS
    m, e, n, k = problem.integers(*"menk")
    for choice in shapes.ranked(m, e, n, k, processors):
        yield shapes.config_of(choice, processors)


def config(problem: Problem, target: Target) -> Config:
    """What a model of its time expects to be the fastest."""
    return next(iter(space(problem, target)))


def misfit(problem: Problem, config: Config) -> str | None:
    """None, or why the shape of a configuration does not multiply the weights of `problem`."""
    return shapes.misfit_of(config, "", problem.integer("k"), problem.integer("e"))


KERNEL = Kernel(
    op="grouped_linear",
    name="grouped_linear_dense_sm90",
    provider="gristmill",
    language="cuda",
    target="gristmill.kernels.moe.grouped_linear.dense_sm90._launch:launch",
    requires=Requirement(features=(frozenset({"wgmma", "tma"}),), vendors=("nvidia",), code="cuda:sm_90a"),
    summary="persistent CTAs over a list of tiles made on the device, each multiplied at the width of its rows; every epilogue",
    accepts=accepts,
    config=config,
    space=space,
    misfit=misfit,
    layouts=("dense_v1",),
    examples=(
        "m=300,e=3,n=520,k=640",
        "m=257,e=5,n=264,k=72,x=fp16,w=fp16,epilogue=bias",
        "m=600,e=4,n=1040,k=512,epilogue=silu_mul",
        "m=33,e=40,n=96,k=264,epilogue=bias+silu_mul+clamp",
        "m=7,e=65,n=16,k=264,epilogue=silu_mul",
    ),
    waits=True,
    triggers=True,
    priority=58,
)
