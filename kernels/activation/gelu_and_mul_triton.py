"""gelu(gate) · up in Triton: the kernel of `activation` with a gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target
from gristmill.kernels.activation._functions_triton import constants
from gristmill.kernels.activation.activation_triton import activation_kernel, launch_rows
from gristmill.kernels.activation.silu_and_mul_triton import config, space
from gristmill.kernels.aot import AotCase
from gristmill.kernels.dependent_launch import overlap_on

if TYPE_CHECKING:
    from gristmill.kernels.calls import GeluAndMulCall

FUNCTION = {"none": "gelu", "tanh": "gelu_tanh"}
"""By `approximate`."""


def launch(config: Config, call: GeluAndMulCall) -> None:
    """x [..., 2N] -> out [..., N]."""
    launch_rows(config, FUNCTION[call.approximate], True, call.x, call.out)


def aot(target: Target) -> list[AotCase]:
    """What the compile matrix builds: the block that long rows take, by either formula, in bf16 and fp32."""
    sizes = {"x_stride": "i32", "out_stride": "i32", "n": "i32"}
    return [
        AotCase(
            name,
            activation_kernel,
            {"x": f"*{name}", "out": f"*{name}"} | sizes,
            {"BLOCK": 1024, "GATED": True}
            | constants("gelu_tanh" if name == "bf16" else "gelu")
            | overlap_on(target),
            {"num_warps": 4},
        )
        for name in ("bf16", "fp32")
    ]


KERNEL = Kernel(
    op="gelu_and_mul",
    name="gelu_and_mul_triton",
    provider="gristmill",
    language="triton",
    target=f"{__name__}:launch",
    aot=f"{__name__}:aot",
    requires=Requirement(code="triton"),
    summary="one program per row and block of columns, float32 inside",
    config=config,
    space=space,
    batch_invariant=True,
    waits=True,
    triggers=True,
    priority=50,
)
