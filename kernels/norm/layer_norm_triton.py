"""LayerNorm in Triton: one program per row; rows up to 16,384 stay in registers, longer ones are read three times."""

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
    from gristmill.kernels.calls import LayerNormCall


@jit
def normed(centred, scale, weight, bias, columns, inside, BIAS: tl.constexpr):
    """centred · scale · weight + bias at some columns, float32."""
    y = centred * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        y += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    return y


@jit
def added(source, residual, inside):
    """The sum of x and the residual at some columns, stored in the residual and rounded to its dtype; float32."""
    total = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(residual, mask=inside, other=0.0).to(tl.float32)
    stored = total.to(residual.dtype.element_ty)
    tl.store(residual, stored, mask=inside)
    return stored.to(tl.float32)


@jit
def layer_norm_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    x_stride,
    residual_stride,
    out_stride,
    n,
    eps,
    BLOCK: tl.constexpr,
    ONE_PASS: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    columns = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    source = x + row * x_stride + columns
    sums = residual + row * residual_stride + columns
    to = out + row * out_stride + columns
    if ONE_PASS:
        inside = columns < n
        if RESIDUAL:
            values = added(source, sums, inside)
        else:
            values = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        centred = tl.where(inside, values - tl.sum(values, 0) / n, 0.0)
        scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / n + eps)
        y = normed(centred, scale, weight, bias, columns, inside, BIAS)
        tl.store(to, y.to(out.dtype.element_ty), mask=inside)
    else:
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, n, BLOCK):
            inside = start + columns < n
            if RESIDUAL:
                total += added(source + start, sums + start, inside)
            else:
                total += tl.load(source + start, mask=inside, other=0.0).to(tl.float32)
        if RESIDUAL:
            tl.debug_barrier()  # the other passes read what other threads of the program may have stored
            source = sums
        mean = tl.sum(total, 0) / n
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, n, BLOCK):
            inside = start + columns < n
            centred = tl.load(source + start, mask=inside, other=0.0).to(tl.float32) - mean
            total += tl.where(inside, centred * centred, 0.0)
        scale = 1.0 / tl.sqrt(tl.sum(total, 0) / n + eps)
        for start in range(0, n, BLOCK):
            inside = start + columns < n
            centred = tl.load(source + start, mask=inside, other=0.0).to(tl.float32) - mean
            y = normed(centred, scale, weight, bias, start + columns, inside, BIAS)
            tl.store(to + start, y.to(out.dtype.element_ty), mask=inside)


def launch(config: Config, call: LayerNormCall) -> None:
    """The arguments of `layer_norm.reference`, then out [..., N]."""
    n = call.x.shape[-1]
    rows = call.x.numel() // n if n else 0
    if rows:
        layer_norm_kernel[(rows,)](
            call.x,
            call.weight,
            call.weight if call.bias is None else call.bias,
            call.out if call.residual is None else call.residual,
            call.out,
            row_stride(call.x),
            0 if call.residual is None else row_stride(call.residual),
            row_stride(call.out),
            n,
            call.eps,
            BIAS=call.bias is not None,
            RESIDUAL=call.residual is not None,
            **options(config, n, call.x),
        )


def aot(target: Target) -> list[AotCase]:
    """What the compile matrix builds: both paths, with and without a bias and a residual, in bf16."""
    signature = dict.fromkeys(("x", "weight", "bias", "residual", "out"), "*bf16")
    signature |= dict.fromkeys(("x_stride", "residual_stride", "out_stride", "n"), "i32") | {"eps": "fp32"}
    cases = {
        "one_pass": {"BLOCK": 4096, "ONE_PASS": True, "BIAS": False, "RESIDUAL": False},
        "one_pass_added": {"BLOCK": 1024, "ONE_PASS": True, "BIAS": True, "RESIDUAL": True},
        "three_passes": {"BLOCK": 8192, "ONE_PASS": False, "BIAS": True, "RESIDUAL": True},
    }
    return [
        AotCase(name, layer_norm_kernel, signature, constants | overlap_on(target), {"num_warps": 8})
        for name, constants in cases.items()
    ]


KERNEL = Kernel(
    op="layer_norm",
    name="layer_norm_triton",
    provider="gristmill",
    language="triton",
    target=f"{__name__}:launch",
    aot=f"{__name__}:aot",
    requires=Requirement(code="triton"),
    summary="one program per row, float32 inside",
    supports=("residual",),
    config=config,
    space=space,
    batch_invariant=True,
    waits=True,
    triggers=True,
    priority=50,
)
