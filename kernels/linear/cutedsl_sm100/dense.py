"""Dense products in CuTe DSL for data-centre Blackwell (`_dense.py`), compiled on the user's machine: bias, gating and residual in one launch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, ConfigValue, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.cutedsl import CuteDslCase, program
from gristmill.kernels.linear.cutedsl_sm100.shapes import WHOLE, configs, requirement

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearCall


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K] fp16 or bf16, one dense tensor [N, K] of the same dtype -> out [..., N or N / 2]. Compiles at first use.

    Raises:
        ValueError: a weight whose rows do not start at multiples of 16 bytes.
    """
    from gristmill.kernels.common import need
    from gristmill.kernels.linear.cutedsl_sm100._arguments import aligned, aligned_rows
    from gristmill.kernels.linear.cutedsl_sm100._dense import dense_product

    (weight,), k, columns = call.weight, call.x.shape[-1], call.out.shape[-1]
    need(
        aligned(weight),
        f"linear_cutedsl_sm100: rows of the weight must be contiguous and start at multiples of 16 bytes, got strides {weight.stride()}",
    )
    m = call.x.numel() // k
    if m == 0:
        return
    out = call.out.view(m, columns)
    program(dense_product, config)(
        aligned_rows(call.x, m, k),
        weight,
        out if call.bias is None else call.bias,
        out if call.residual is None else call.residual.reshape(m, columns),
        out,
        config["ctas"],
    )


def accepts(problem: Problem) -> str | None:
    """None, or the reason why not."""
    x, w, (n, k) = problem.text("x"), QuantScheme.parse(problem.text("w")), problem.integers(*"nk")
    if x not in ("fp16", "bf16") or str(w) != x:
        return f"multiplies fp16 by fp16 and bf16 by bf16, not {x} by {w}"
    columns = n // 2 if "silu_mul" in problem.flags("epilogue") else n
    if k % 8 or columns % 8 or not k:
        return f"rows of x, W and y must be whole 16 bytes: needs K and y's columns in multiples of 8, got {k} and {columns}"
    return None


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Every tile, best first by an estimate."""
    return configs(WHOLE, problem, target)


def config(problem: Problem, target: Target) -> Config:
    """The first of `space`."""
    return next(iter(space(problem, target)))


def aot(target: Target) -> list[CuteDslCase]:
    """The largest tile without an epilogue, the smallest with all of it."""
    cases: dict[str, dict[str, ConfigValue]] = {
        "256": {**WHOLE[0]._asdict(), "epilogue": "none", "x": "bf16"},
        "64_bias_residual_silu_mul": {
            **WHOLE[2]._asdict(),
            "epilogue": "bias+residual+silu_mul",
            "x": "fp16",
        },
    }
    build = "gristmill.kernels.linear.cutedsl_sm100._dense:dense_product"
    return [
        CuteDslCase(name, build, {**chosen, "arch": target.nvcc_arch or "sm_100a"}, ("tcgen05", "tma"))
        for name, chosen in cases.items()
    ]


KERNEL = Kernel(
    op="linear",
    name="linear_cutedsl_sm100",
    provider="gristmill",
    language="cutedsl",
    target=f"{__name__}:launch",
    aot=f"{__name__}:aot",
    requires=requirement(),
    summary="persistent warp-specialized tcgen05, operands and y by TMA, bias, gating and residual included",
    accepts=accepts,
    config=config,
    space=space,
    layouts=("dense_v1",),
    examples=(
        "m=300,n=520,k=640",
        "m=257,n=264,k=72,x=fp16,w=fp16,epilogue=bias",
        "m=1,n=4096,k=1024,epilogue=bias+residual+silu_mul",
        "m=600,n=1040,k=512,epilogue=silu_mul",
        "m=33,n=96,k=136,epilogue=residual",
        "m=2048,n=4096,k=264,x=fp16,w=fp16,epilogue=bias+residual",
        "m=0,n=64,k=64",
    ),
    priority=55,
)
