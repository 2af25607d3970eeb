"""silu(gate) · up with quantized output in Triton: one program per row where the row shares a scale, else per block of columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import cdiv, next_power_of_2
from gristmill.kernel_registry.target import Target
from gristmill.kernels.activation._quantize_values_triton import (
    code_of,
    magnitude_bits,
    quantize_block,
    scale_of,
)
from gristmill.kernels.aot import AotCase
from gristmill.kernels.common import row_stride
from gristmill.kernels.dependent_launch import begin, overlap_on, overlapped
from gristmill.kernels.lazy_triton import jit, tl
from gristmill.kernels.quantized_rows import as_stored, config_of

if TYPE_CHECKING:
    from gristmill.kernels.calls import SiluAndMulQuantCall


def config(problem: Problem, target: Target) -> Config:
    """Blocks of at most 4,096 columns of a row with one scale, of 1,024 otherwise; eight elements per thread; and the format."""
    form = config_of(problem)
    whole = form["least"] != 0 and form["group"] == 0
    block = min(4096 if whole else 1024, max(128, next_power_of_2(problem.integer("n"))))
    return {"block": block, "warps": max(1, block // 256), **form}


@jit
def product(x, columns, n):
    """silu(gate) · up at some columns of a row, rounded to its dtype; 0 past the row."""
    inside = columns < n
    gate = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + n + columns, mask=inside, other=0.0).to(tl.float32)
    return (gate / (1.0 + tl.exp(-gate)) * up).to(x.dtype.element_ty).to(tl.float32)


@jit
def silu_and_mul_quant_kernel(
    x,
    codes,
    scales,
    x_stride,
    codes_stride,
    scale_row,
    scale_group,
    n,
    least,
    top,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    INT8: tl.constexpr,
    GIVEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    codes += row * codes_stride
    if GROUP == 0:
        bits = tl.zeros([BLOCK], tl.int32)
        for start in range(0, n, BLOCK):
            bits = tl.maximum(bits, magnitude_bits(product(x, start + tl.arange(0, BLOCK), n)))
        scale = scale_of(tl.max(tl.reshape(bits, [1, BLOCK]), 1), least, top)
        tl.store(scales + row * scale_row + tl.arange(0, 1), scale)
        for start in range(0, n, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            values = tl.reshape(product(x, columns, n), [1, BLOCK])
            code = code_of(values, tl.broadcast_to(scale[:, None], values.shape), INT8)
            tl.store(codes + columns, tl.reshape(code, [BLOCK]), mask=columns < n)
    else:
        part = tl.program_id(1)
        columns = part * BLOCK + tl.arange(0, BLOCK)
        values = product(x, columns, n)
        at = scales + row * scale_row
        first = part * (BLOCK // GROUP)
        quantize_block(
            values, columns, n, codes, at, scale_group, first, least, top, BLOCK, GROUP, INT8, GIVEN
        )


def launch(config: Config, call: SiluAndMulQuantCall) -> None:
    """The arguments of `silu_and_mul_quant.reference`."""
    n, given, block = call.codes.shape[-1], config["least"] == 0, int(config["block"])
    rows = call.codes.numel() // n
    group = int(config["group"]) or (block if given else 0)
    if rows:
        silu_and_mul_quant_kernel[(rows, cdiv(n, block) if group else 1)](
            call.x,
            as_stored(call.codes),
            call.scales,
            row_stride(call.x),
            row_stride(call.codes),
            0 if given else call.scales.stride(0),
            0 if given else call.scales.stride(1),
            n,
            config["least"],
            config["top"],
            BLOCK=block,
            GROUP=group,
            INT8=config["top"] == 127,
            GIVEN=given,
            num_warps=config["warps"],
            **overlapped(call.x),
        )


def aot(target: Target) -> list[AotCase]:
    """What the compile matrix builds, in bf16: a scale per row, per 128 columns, of the tensor; e4m3 and int8."""
    sizes = dict.fromkeys(("x_stride", "codes_stride", "scale_row", "scale_group", "n"), "i32")
    signature = {"x": "*bf16", "scales": "*fp32", **sizes, "least": "fp32", "top": "fp32"}
    cases: dict[str, dict[str, int | bool]] = {
        "fp8_token": {"GROUP": 0, "BLOCK": 4096},
        "fp8_g128": {"GROUP": 128},
        "fp8": {"GIVEN": True},
        "int8_token": {"GROUP": 0, "BLOCK": 4096, "INT8": True},
    }
    constants = {"BLOCK": 1024, "GROUP": 1024, "INT8": False, "GIVEN": False}
    return [
        AotCase(
            name,
            silu_and_mul_quant_kernel,
            signature | {"codes": "*i8" if "INT8" in chosen else "*u8"},
            constants | chosen | overlap_on(target),
            {"num_warps": 4},
        )
        for name, chosen in cases.items()
    ]


KERNEL = Kernel(
    op="silu_and_mul_quant",
    name="silu_and_mul_quant_triton",
    provider="gristmill",
    language="triton",
    target=f"{__name__}:launch",
    aot=f"{__name__}:aot",
    requires=Requirement(code="triton"),
    summary="one program per row, or row and block of columns, float32 inside",
    config=config,
    batch_invariant=True,
    waits=True,
    triggers=True,
    priority=50,
)
