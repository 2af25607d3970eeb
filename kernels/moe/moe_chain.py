"""MoE as its decomposed chain of parts: by torch anywhere, by Triton's parts on devices that Triton reaches."""

from __future__ import annotations

from functools import partial
from typing import Any

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.moe import _chain


def launch_torch(
    config: Config, x: Any, weights: Any, ids: Any, w13: Any, w2: Any, inter: int, workspace: Any, out: Any
) -> None:
    """x [T, H] -> out [T, H] through the torch parts; without a workspace it allocates one."""
    from gristmill.kernels.moe import combine_torch, grouped_linear_torch, permute_torch

    grouped = partial(grouped_linear_torch.launch, config)
    parts = _chain.Parts(partial(permute_torch.launch, {}), grouped, grouped, partial(combine_torch.launch, {}))
    _chain.run(parts, x, weights, ids, w13, w2, config["i"], config["e"], workspace, out)


def accepts(problem: Problem) -> str | None:
    """Weight-only and dense schemes."""
    activation = QuantScheme.parse(problem.text("w")).activation
    return None if activation is None else f"takes activations in their own dtype, not {activation}"


def config(problem: Problem, target: Target) -> Config:
    """The scheme and the sizes, which packed tensors do not tell."""
    return {"scheme": problem.text("w"), "e": problem.integer("e"), "i": problem.integer("i")}


KERNEL = Kernel(
    op="moe",
    name="moe_chain_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch_torch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="permute, two grouped_linear, combine, all by torch; synchronises",
    accepts=accepts,
    config=config,
    workspace=_chain.workspace,
    layouts=("dense_v1", "plain_v1", "cpu_rows16_v1"),
    sources=("_chain.py", "permute_torch.py", "grouped_linear_torch.py", "combine_torch.py"),
)
