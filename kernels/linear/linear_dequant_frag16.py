"""Any number of rows over frag16 tiles: a Triton kernel dequantizes some rows of the weight at a time, torch multiplies.

What serves the buckets of a plan that the decode kernels leave: with many rows of x the product costs more than the bytes.
bf16 and fp16 activations meet the weight rounded once to their dtype.
"""

from __future__ import annotations

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target

_SCHEMES = ("int4", "mxfp4", "nvfp4", "int8", "fp8")


def accepts(problem: Problem) -> str | None:
    """Weight-only formats that a frag16 layout holds."""
    scheme = QuantScheme.parse(problem.text("w"))
    if scheme.activation is not None or not scheme.weights.startswith(_SCHEMES):
        return f"dequantizes weight-only int4, int8, fp8, mxfp4 and nvfp4, not {scheme}"
    return None


def config(problem: Problem, target: Target) -> Config:
    """The scheme, which packed tensors do not tell."""
    return {"scheme": problem.text("w")}


KERNEL = Kernel(
    op="linear",
    name="linear_dequant_frag16",
    provider="gristmill",
    language="triton",
    target="gristmill.kernels.linear._dequant_frag16_triton:launch",
    aot="gristmill.kernels.linear._dequant_frag16_triton:aot",
    requires=Requirement(code="triton"),
    summary="frag16 tiles dequantized some rows at a time, then torch's product: any M over the layouts of the decode kernels",
    accepts=accepts,
    config=config,
    layouts=("w4_frag16_v1", "f4_frag16_v1", "w8_frag16_v1"),
    priority=40,
)
