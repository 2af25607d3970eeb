"""Symmetric int4 weights by torch's own product (`torch._weight_int4pack_mm`, tinygemm), over tinygemm_v1."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearCall

GROUPS = (32, 64, 128)


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K] bf16, the two tensors of tinygemm_v1 -> out [..., N or N / 2]."""
    import torch

    from gristmill.kernels.linear._epilogue import finish_in_torch

    z = torch._weight_int4pack_mm(
        call.x.reshape(-1, call.x.shape[-1]).contiguous(),
        call.weight[0],
        int(config["group"]),
        call.weight[1],
    )
    width = call.out.shape[-1]
    finish_in_torch(
        z,
        call.bias,
        None if call.residual is None else call.residual.view(-1, width),
        call.silu_mul,
        call.out.view(-1, width),
    )


def accepts(problem: Problem) -> str | None:
    """bf16 activations, symmetric int4 in groups, and N and K that fill whole tiles."""
    scheme = QuantScheme.parse(problem.text("w"))
    if scheme.name not in [f"int4_g{group}" for group in GROUPS]:
        return f"multiplies int4 in groups of {', '.join(map(str, GROUPS))} without zero points, not {scheme}"
    if problem.text("x") != "bf16":
        return f"takes bf16 activations, not {problem.text('x')}"
    if problem["act_order"]:
        return "takes no act-order"
    n, k = problem.integer("n"), problem.integer("k")
    return f"needs N a multiple of 8 and K of 128, got N={n}, K={k}" if n % 8 or k % 128 else None


def config(problem: Problem, target: Target) -> Config:
    """The group size, which packed tensors determine only together with K."""
    return {"group": QuantScheme.parse(problem.text("w")).group_size or 0}


KERNEL = Kernel(
    op="linear",
    name="linear_int4_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(
        features=(frozenset({"mma.bf16"}),), vendors=("nvidia",), packages=(("torch", "2.11"),)
    ),
    summary="torch's own int4 product (tinygemm)",
    accepts=accepts,
    config=config,
    layouts=("tinygemm_v1",),
    examples=(
        "m=1,n=264,k=384,w=int4_g128",
        "m=33,n=128,k=256,w=int4_g32,epilogue=bias+silu_mul",
        "m=257,n=136,k=512,w=int4_g64,epilogue=residual",
    ),
)
