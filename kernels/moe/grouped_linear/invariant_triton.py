"""Grouped linear and MoE in Triton whose rows have the same bits in every batch: one tile for any number of rows per expert."""

from __future__ import annotations

from gristmill.kernel_registry.kernel import Config, Kernel, no_workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase
from gristmill.kernels.linear.triton import accepts_dense, accepts_quantized, tile
from gristmill.kernels.moe import _chain
from gristmill.kernels.moe.grouped_linear.triton import aot
from gristmill.kernels.moe.moe import chain

ROWS = 32


def config(problem: Problem, target: Target) -> Config:
    """The tile depends on the scheme and x's dtype only."""
    scheme, is_fp32 = QuantScheme.parse(problem.text("w")), problem.text("x") == "fp32"
    return {"scheme": scheme.name, **tile(scheme, ROWS, 32 if is_fp32 else 64, target)}


def aot_dense(target: Target) -> list[AotCase]:
    """What the compile matrix builds of the dense kernel."""
    return [case for case in aot(target, config) if case.name.startswith("dense")]


def aot_quantized(target: Target) -> list[AotCase]:
    """What the compile matrix builds of the weight-only kernel."""
    return [case for case in aot(target, config) if not case.name.startswith("dense")]


KERNELS = tuple(
    Kernel(
        op=op,
        name=f"{name}_{'' if layout == 'dense_v1' else 'w_'}invariant_triton",
        provider="gristmill",
        language="triton",
        target=f"gristmill.kernels.moe.{target}",
        aot=f"{__name__}:aot_{kind}" if op == "grouped_linear" else None,
        requires=Requirement(code="triton"),
        summary=f"{summary}, one tile for any number of rows, {weights}",
        accepts=accepts,
        config=config,
        supports=supports,
        reads=reads,
        workspace=workspace,
        layouts=(layout,),
        batch_invariant=True,
        priority=20,
    )
    for op, name, target, supports, reads, workspace, summary in (
        (
            "grouped_linear",
            "grouped_linear",
            "grouped_linear.triton:launch",
            (),
            (),
            no_workspace,
            "linear's tiles",
        ),
        (
            "moe",
            "moe_chain",
            "moe.chain:launch_triton",
            ("activation", "gated"),
            _chain.ORDER,
            chain.workspace,
            "permute, two products, combine",
        ),
    )
    for layout, accepts, kind, weights in (
        ("dense_v1", accepts_dense, "dense", "dense weights"),
        ("plain_v1", accepts_quantized, "quantized", "codes decoded by integer arithmetic"),
    )
)
