"""RMSNorm with quantized output in Triton: one program per row, which stays in registers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import next_power_of_2
from gristmill.kernel_registry.target import Target
from gristmill.kernels.activation._quantize_values_triton import quantize_block
from gristmill.kernels.aot import AotCase
from gristmill.kernels.common import row_stride
from gristmill.kernels.dependent_launch import begin, overlap_on, overlapped
from gristmill.kernels.lazy_triton import jit, tl
from gristmill.kernels.quantized_rows import as_stored, config_of

if TYPE_CHECKING:
    from gristmill.kernels.calls import RmsNormQuantCall

LONGEST_ROW = 16384


def config(problem: Problem, target: Target) -> Config:
    """The whole row, one warp for each 512 elements of it, and the format."""
    block = max(128, next_power_of_2(problem.integer("n")))
    return {"block": block, "warps": min(16, max(1, block // 512)), **config_of(problem)}


def accepts(problem: Problem) -> str | None:
    """Rows that fit in the registers of a program."""
    n = problem.integer("n")
    return None if n <= LONGEST_ROW else f"keeps rows of at most {LONGEST_ROW} elements in registers, not {n}"


@jit
def rms_norm_quant_kernel(
    x,
    residual,
    weight,
    codes,
    scales,
    x_stride,
    residual_stride,
    codes_stride,
    scale_row,
    scale_group,
    normed_stride,
    n,
    eps,
    least,
    top,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    ADD: tl.constexpr,
    INT8: tl.constexpr,
    GIVEN: tl.constexpr,
    OVERLAP: tl.constexpr,
    normed=None,
):
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        sums = residual + row * residual_stride + columns
        values += tl.load(sums, mask=inside, other=0.0).to(tl.float32)
        stored = values.to(x.dtype.element_ty)
        tl.store(sums, stored, mask=inside)
        values = stored.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / n + eps)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    rounded = (values * scale * gain).to(x.dtype.element_ty)
    if normed is not None:
        tl.store(normed + row * normed_stride + columns, rounded, mask=inside)
    quantize_block(
        rounded.to(tl.float32),
        columns,
        n,
        codes + row * codes_stride,
        scales + row * scale_row,
        scale_group,
        0,
        least,
        top,
        BLOCK,
        GROUP,
        INT8,
        GIVEN,
    )


def launch(config: Config, call: RmsNormQuantCall) -> None:
    """The arguments of `rms_norm_quant.reference`."""
    n, given = call.x.shape[-1], config["least"] == 0
    rows = call.x.numel() // n
    if rows:
        rms_norm_quant_kernel[(rows,)](
            call.x,
            call.x if call.residual is None else call.residual,
            call.weight,
            as_stored(call.codes),
            call.scales,
            row_stride(call.x),
            0 if call.residual is None else row_stride(call.residual),
            row_stride(call.codes),
            0 if given else call.scales.stride(0),
            0 if given else call.scales.stride(1),
            0 if call.normed is None else row_stride(call.normed),
            n,
            call.eps,
            config["least"],
            config["top"],
            BLOCK=config["block"],
            GROUP=config["group"] or config["block"],
            ADD=call.residual is not None,
            INT8=config["top"] == 127,
            GIVEN=given,
            normed=call.normed,
            num_warps=config["warps"],
            **overlapped(call.x),
        )


def aot(target: Target) -> list[AotCase]:
    """What the compile matrix builds, in bf16 with a residual: a scale per row, per 128 columns, of the tensor; e4m3 and int8."""
    pointers = {"x": "*bf16", "residual": "*bf16", "weight": "*bf16", "scales": "*fp32"}
    strides = ("x_stride", "residual_stride", "codes_stride", "scale_row", "scale_group", "normed_stride")
    names = (*strides, "n")
    sizes = dict.fromkeys(names, "i32") | dict.fromkeys(("eps", "least", "top"), "fp32")
    constants = {"BLOCK": 4096, "GROUP": 4096, "ADD": True, "INT8": False, "GIVEN": False, "normed": None}
    cases: dict[str, dict[str, int | bool]] = {
        "fp8_token": {},
        "fp8_g128": {"GROUP": 128},
        "fp8": {"GIVEN": True},
        "int8_token": {"INT8": True},
    }
    return [
        AotCase(
            name,
            rms_norm_quant_kernel,
            pointers | sizes | {"codes": "*i8" if "INT8" in chosen else "*u8"},
            constants | chosen | overlap_on(target),
            {"num_warps": 8},
        )
        for name, chosen in cases.items()
    ]


KERNEL = Kernel(
    op="rms_norm_quant",
    name="rms_norm_quant_triton",
    provider="gristmill",
    language="triton",
    target=f"{__name__}:launch",
    aot=f"{__name__}:aot",
    requires=Requirement(code="triton"),
    summary="one program per row, float32 inside",
    accepts=accepts,
    supports=("normed",),
    config=config,
    batch_invariant=True,
    waits=True,
    triggers=True,
    priority=50,
)
