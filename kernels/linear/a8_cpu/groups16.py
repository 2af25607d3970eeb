"""Linear with int8 activations in C++ for CPUs over cpu_groups16_v1 (`_linear_a8_cpu.cpp`): the types of GGUF files.

Codes, scales and minimums are those of the file. x is quantized in the kernel to int8 in blocks of 32, as ggml's own products do for
types in blocks of 32 (its K-quants take blocks of 256); units are added in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.common import dtype_name
from gristmill.kernels.linear.a8_cpu.rows16 import BLOCKS
from gristmill.kernels.linear.cpu import shape_of
from gristmill.kernels.native import best_config
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from torch import Tensor

    from gristmill.kernels.calls import LinearCall

ENTRY = CallEntry("gm_linear_a8_groups16", "linear")
ROWS, RUN = 16, 256
LINE_BYTES = {4: 8, 5: 10, 6: 12, 8: 16}
"""Bytes of 16 rows of a column, by bits per code."""
_LEVEL = best_config("gm_linear_a8_groups16")


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K], the five tensors of cpu_groups16_v1 -> out [..., N or N / 2]."""
    try:
        ENTRY.cpu(config, call)
    except (TypeError, ValueError):
        _need_groups16(config, call.weight, *shape_of(call))
        raise


def _need_groups16(config: Config, weight: list[Tensor], n: int, k: int) -> None:
    """ValueError unless the tensors are a weight [n, k] of cpu_groups16_v1."""
    codes, scales, offsets, factors, offset_factors = weight
    group, bits = int(config["group"]), int(config["bits"])
    blocks, groups = cdiv(n, ROWS), k // group
    scaled, factored = blocks * groups * ROWS, blocks * (k // RUN) * ROWS
    for name, slot, size, dtype in (
        ("codes", codes, blocks * k * LINE_BYTES[bits], "uint8"),
        ("scales", scales, scaled, ""),
        ("offsets", offsets, scaled if config["minimums"] else 0, ""),
        ("factors", factors, factored if _is_int8(scales) else 0, "fp32"),
        ("offset_factors", offset_factors, factored if _is_int8(offsets) else 0, "fp32"),
    ):
        if slot.numel() != size or not slot.is_contiguous():
            raise ValueError(
                f"linear_a8_groups_cpu: {name} of a [{n}, {k}] weight are {size} contiguous elements, got {tuple(slot.shape)}"
            )
        if dtype and dtype_name(slot.dtype) != dtype:
            raise ValueError(f"linear_a8_groups_cpu: {name} must be {dtype}, got {slot.dtype}")


def _is_int8(values: Tensor) -> bool:
    return values.numel() > 0 and dtype_name(values.dtype) == "int8"


def accepts(problem: Problem) -> str | None:
    """Integer groups of 4, 5, 6 or 8 bits that cpu_rows16_v1 does not hold, with int8 activations."""
    scheme = QuantScheme.parse(problem.text("w"))
    if scheme.activation not in BLOCKS:
        return f"takes activations of {', '.join(BLOCKS)}, not {scheme.activation or 'their own dtype'}"
    step = 32 if scheme.bits == 5 else 16
    if (
        not scheme.is_integer
        or scheme.is_named
        or scheme.zero_points
        or scheme.bits not in LINE_BYTES
        or (scheme.group_size or 1) % step
    ):
        return f"multiplies groups of GGUF's integer types of 4, 5, 6 and 8 bits, not {scheme}"
    if problem["act_order"] or problem.integer("k") % (scheme.group_size or 1):
        return "takes columns in order, and whole groups"
    return None


def config(problem: Problem, target: Target) -> Config:
    """The code level, what the scheme determines of a packed weight, and the block of x (0 = row)."""
    scheme = QuantScheme.parse(problem.text("w"))
    return {
        **_LEVEL(problem, target),
        "bits": scheme.bits,
        "group": scheme.group_size or 0,
        "minimums": scheme.minimums,
        "block": BLOCKS[scheme.activation or ""],
    }


KERNEL = Kernel(
    op="linear",
    name="linear_a8_groups_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="GGUF's integer types as they are stored, x quantized to int8, products and sums of groups in integers",
    accepts=accepts,
    supports=("codes",),
    config=config,
    layouts=("cpu_groups16_v1",),
    examples=(
        "m=3,n=40,k=512,x=bf16,w=int4_g32_min.int8_g32",
        "m=1,n=17,k=256,x=fp32,w=int5_g32.int8_g32",
        "m=7,n=64,k=256,x=fp32,w=int5_g32_min.int8_g32,epilogue=silu_mul",
        "m=5,n=33,k=768,x=bf16,w=int6_g16.int8_g32,epilogue=bias+residual",
        "m=13,n=16,k=96,x=fp16,w=int8_g32.int8_g32",
    ),
    batch_invariant=True,
    priority=100,
)
