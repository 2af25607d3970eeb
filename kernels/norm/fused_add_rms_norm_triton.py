"""Residual addition and RMSNorm in Triton: one program per row; rows over 16,384 are walked twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase
from gristmill.kernels.common import row_stride
from gristmill.kernels.dependent_launch import begin, overlap_on
from gristmill.kernels.lazy_triton import jit, tl
from gristmill.kernels.norm.rms_norm_triton import config, options, space

if TYPE_CHECKING:
    from gristmill.kernels.calls import FusedAddRmsNormCall


@jit
def fused_add_rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    x_stride,
    residual_stride,
    out_stride,
    n,
    eps,
    BLOCK: tl.constexpr,
    ONE_PASS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    residual += row * residual_stride
    out += row * out_stride
    columns = tl.arange(0, BLOCK)
    if ONE_PASS:
        inside = columns < n
        added = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
        added += tl.load(residual + columns, mask=inside, other=0.0).to(tl.float32)
        stored = added.to(residual.dtype.element_ty)
        tl.store(residual + columns, stored, mask=inside)
        values = stored.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / n + eps)
        gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + columns, (values * scale * gain).to(out.dtype.element_ty), mask=inside)
    else:
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, n, BLOCK):
            inside = start + columns < n
            added = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
            added += tl.load(residual + start + columns, mask=inside, other=0.0).to(tl.float32)
            stored = added.to(residual.dtype.element_ty)
            tl.store(residual + start + columns, stored, mask=inside)
            values = stored.to(tl.float32)
            total += values * values
        scale = 1.0 / tl.sqrt(tl.sum(total, 0) / n + eps)
        tl.debug_barrier()  # the second loop reads what other threads of the program may have stored
        for start in range(0, n, BLOCK):
            inside = start + columns < n
            values = tl.load(residual + start + columns, mask=inside, other=0.0).to(tl.float32)
            gain = tl.load(weight + start + columns, mask=inside, other=0.0).to(tl.float32)
            tl.store(out + start + columns, (values * scale * gain).to(out.dtype.element_ty), mask=inside)


def launch(config: Config, call: FusedAddRmsNormCall) -> None:
    """x [..., N], residual [..., N] (written in place), weight [N] -> out [..., N]."""
    n = call.x.shape[-1]
    rows = call.x.numel() // n if n else 0
    if rows:
        fused_add_rms_norm_kernel[(rows,)](
            call.x,
            call.residual,
            call.weight,
            call.out,
            row_stride(call.x),
            row_stride(call.residual),
            row_stride(call.out),
            n,
            call.eps,
            **options(config, n, call.x),
        )


def aot(target: Target) -> list[AotCase]:
    """What the compile matrix builds: both paths, in bf16."""
    pointers = {"x": "*bf16", "residual": "*bf16", "weight": "*bf16", "out": "*bf16"}
    sizes = {"x_stride": "i32", "residual_stride": "i32", "out_stride": "i32", "n": "i32", "eps": "fp32"}
    kernel, signature = fused_add_rms_norm_kernel, pointers | sizes
    return [
        AotCase(
            "one_pass",
            kernel,
            signature,
            {"BLOCK": 4096, "ONE_PASS": True} | overlap_on(target),
            {"num_warps": 8},
        ),
        AotCase(
            "two_pass",
            kernel,
            signature,
            {"BLOCK": 8192, "ONE_PASS": False} | overlap_on(target),
            {"num_warps": 8},
        ),
    ]


KERNEL = Kernel(
    op="fused_add_rms_norm",
    name="fused_add_rms_norm_triton",
    provider="gristmill",
    language="triton",
    target=f"{__name__}:launch",
    aot=f"{__name__}:aot",
    requires=Requirement(code="triton"),
    summary="one program per row, float32 inside",
    config=config,
    space=space,
    supports=("w",),
    batch_invariant=True,
    waits=True,
    triggers=True,
    priority=50,
)
