"""An activation of every value in Triton: one program per row and block of columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.activation._functions_triton import activated, constants
from gristmill.kernels.activation.activation import FUNCTIONS
from gristmill.kernels.activation.silu_and_mul_triton import config, space
from gristmill.kernels.aot import AotCase
from gristmill.kernels.common import row_stride
from gristmill.kernels.dependent_launch import begin, overlap_on, overlapped
from gristmill.kernels.lazy_triton import jit, tl

if TYPE_CHECKING:
    from torch import Tensor

    from gristmill.kernels.calls import ActivationCall


@jit
def activation_kernel(
    x,
    out,
    x_stride,
    out_stride,
    n,
    TWICE_ROOT: tl.constexpr,
    CUBE: tl.constexpr,
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """f(x) of rows of n, or f(gate) · up of rows of 2 n, gate first."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    x += row * x_stride
    v = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x + n + columns, mask=inside, other=0.0).to(tl.float32)
    y = activated(v, TWICE_ROOT, CUBE, FUNCTION)
    if GATED:
        y *= up
    tl.store(out + row * out_stride + columns, y.to(out.dtype.element_ty), mask=inside)


BETWEEN_PRODUCTS: Config = {"block": 1024, "warps": 4}
"""The configuration between the products of `moe`."""


def launch(config: Config, call: ActivationCall) -> None:
    """x [..., N] -> out [..., N]."""
    launch_rows(config, call.function, False, call.x, call.out)


def between_products(function: str, gated: bool, z: Tensor, out: Tensor) -> None:
    """The activation of `moe`: z [P, 2 I], gate first, or [P, I] -> out [P, I]; without a gate z may be out."""
    launch_rows(BETWEEN_PRODUCTS, function, gated, z, out)


def launch_rows(config: Config, function: str, gated: bool, x: Tensor, out: Tensor) -> None:
    """x [..., N], or [..., 2 N] with a gate, which comes first -> out [..., N]; one launch, none without rows."""
    n, block = out.shape[-1], int(config["block"])
    rows = out.numel() // n
    if rows:
        activation_kernel[(rows, cdiv(n, block))](
            x,
            out,
            row_stride(x),
            row_stride(out),
            n,
            **constants(function),
            GATED=gated,
            BLOCK=block,
            num_warps=config["warps"],
            **overlapped(x),
        )


def aot(target: Target) -> list[AotCase]:
    """What the compile matrix builds: every function, and one of a gate, in bf16."""
    sizes = {"x_stride": "i32", "out_stride": "i32", "n": "i32"}
    return [
        AotCase(
            name,
            activation_kernel,
            {"x": "*bf16", "out": "*bf16"} | sizes,
            {"BLOCK": 1024, "GATED": gated} | constants(function) | overlap_on(target),
            {"num_warps": 4},
        )
        for name, function, gated in (
            *((name, name, False) for name in FUNCTIONS),
            ("gelu_tanh_gated", "gelu_tanh", True),
        )
    ]


KERNEL = Kernel(
    op="activation",
    name="activation_triton",
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
