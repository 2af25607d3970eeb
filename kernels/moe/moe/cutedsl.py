"""MoE of dense weights: permute and combine in Triton, both products in CuTe DSL (grouped_linear_cutedsl_*): moe_cutedsl_sm90, moe_cutedsl_sm100."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, ConfigValue, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.target import Target
from gristmill.kernels.moe import _chain
from gristmill.kernels.moe.grouped_linear.cutedsl import MACHINES, Machine, refusal

if TYPE_CHECKING:
    from gristmill.kernels.calls import MoeCall

TILE = ("bm", "bn", "slots")
"""Entries of a product's configuration that differ between the products; here their names end with its number."""
PROMISING = 3
"""Tiles of either product that are tried with each other, the best first; others are tried with the best one of the other product."""


def launch(config: Config, call: MoeCall) -> None:
    """x [T, H] -> out [T, H]; without a workspace it allocates one. No synchronisation. Compiles at first use."""
    from gristmill.kernels.moe.combine import triton as combine_triton
    from gristmill.kernels.moe.grouped_linear import cutedsl
    from gristmill.kernels.moe.permute import triton as permute_triton

    first, second = (partial(cutedsl.launch, config_of(config, product)) for product in (1, 2))
    combine = partial(combine_triton.launch, combine_triton.block_config(call.x.shape[1]))
    _chain.run(_chain.Parts(partial(permute_triton.launch, {}), first, second, combine), call)


def config_of(config: Config, product: int) -> Config:
    """The configuration of a product. The first gathers rows of x and applies the activation."""
    own = {name: config[f"{name}{product}"] for name in (*TILE, "epilogue")}
    return {**own, "gather": product == 1, **{name: config[name] for name in ("ctas", "x", "arch")}}


def accepts(problem: Problem) -> str | None:
    """None, or the reason why not."""
    w, x, (h, i) = problem.text("w"), problem.text("x"), problem.integers(*"hi")
    return refusal(w, x, i, h) or refusal(w, x, h, i)


def kernel(machine: Machine) -> Kernel:
    """The spec of the kernel of an architecture."""

    def space(problem: Problem, target: Target) -> Iterable[Config]:
        m, top_k, e, h, i = problem.integers("m", "top_k", "e", "h", "i")
        flags, rows, ctas = problem.flags("epilogue"), m * top_k, machine.ctas(target)
        first = {"silu_mul"} | ({"bias"} if "w13_bias" in flags else set()) | ({"clamp"} & set(flags))
        rest: dict[str, ConfigValue] = {
            "epilogue1": "+".join(sorted(first)),
            "epilogue2": "bias" if "w2_bias" in flags else "none",
            **machine.fixed(problem.text("x"), target),
        }
        firsts = machine.ranked(rows, e, 2 * i, ctas)
        seconds = machine.ranked(rows, e, h, ctas)
        # Pairs share programs, of which there is one for each tile of a product: a pair costs its measurement.
        places = sorted(
            itertools.product(range(len(firsts)), range(len(seconds))), key=lambda pair: (sum(pair), pair)
        )
        pairs = [(firsts[n], seconds[k]) for n, k in places if max(n, k) < PROMISING or 0 in (n, k)]
        for pair in pairs:
            yield {
                f"{name}{number}": tile[name] for number, tile in enumerate(pair, 1) for name in TILE
            } | rest

    def config(problem: Problem, target: Target) -> Config:
        return next(iter(space(problem, target)))

    return Kernel(
        op="moe",
        name=f"moe_cutedsl_{machine.name}",
        provider="gristmill",
        language="cutedsl",
        target=f"{__name__}:launch",
        requires=replace(machine.requires, packages=(*machine.requires.packages, ("triton", "3.6"))),
        summary=f"permute, two grouped_linear_cutedsl_{machine.name} with biases and activation as epilogues, combine",
        accepts=accepts,
        config=config,
        space=space,
        reads=_chain.ORDER,
        workspace=_chain.workspace,
        layouts=("dense_v1",),
        examples=(
            "m=9,top_k=3,e=5,h=128,i=128",
            "m=200,top_k=2,e=4,h=256,i=144,x=fp16,w=fp16",
            "m=40,top_k=4,e=6,h=64,i=96,epilogue=w13_bias+w2_bias+clamp",
            "m=70,top_k=2,e=3,h=200,i=72",
        ),
        priority=55,
    )


KERNELS = tuple(kernel(machine) for machine in MACHINES)
