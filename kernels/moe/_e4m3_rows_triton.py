"""Rows of activations as e4m3 codes in Triton, as products of experts take them: a scale for each row, or for 128 columns of it.

The rules of `quant/activations.py`, bit for bit. Each row is quantized once, and gathered as codes by the products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernels.activation._quantize_values_triton import (
    code_of,
    magnitude_bits,
    quantize_block,
    scale_of,
)
from gristmill.kernels.aot import AotCase
from gristmill.kernels.lazy_triton import jit, tl
from gristmill.kernels.moe import _chain

if TYPE_CHECKING:
    from torch import Tensor

GROUPS = {"fp8_token": 0, "fp8_g128": 128}
"""Format -> columns that share a scale; 0: all of them."""
LEAST = {"fp8_token": 1e-10, "fp8_g128": 1e-4}
"""Format -> lower bound of the largest magnitude."""
BLOCK = 1024
"""Columns of a program, or of a step of it."""


class Rows(NamedTuple):
    """Quantized rows: codes e4m3 [R, K] with contiguous rows, scales float32 [R, groups]."""

    codes: Tensor
    scales: Tensor


@jit
def quantize_rows_kernel(
    x, codes, scales, k, stride, groups, least, BLOCK: tl.constexpr, GROUP: tl.constexpr
):
    """A row, or, in groups, a block of columns of a row. Codes are bytes."""
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    codes += row * k
    scales += row * groups
    if GROUP:
        part = tl.program_id(1)
        own = part * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(x + own, mask=own < k, other=0.0).to(tl.float32)
        first = part * (BLOCK // GROUP)
        quantize_block(values, own, k, codes, scales, 1, first, least, 448.0, BLOCK, GROUP, False, False)
    else:
        most = tl.zeros([BLOCK], tl.int32)
        for start in range(0, k, BLOCK):
            own = start + tl.arange(0, BLOCK)
            values = tl.load(x + own, mask=own < k, other=0.0).to(tl.float32)
            most = tl.maximum(most, magnitude_bits(values))
        scale = scale_of(tl.max(tl.reshape(most, [1, BLOCK]), 1), least, 448.0)
        tl.store(scales + tl.arange(0, 1), scale)
        divisor = tl.reshape(tl.broadcast_to(scale[:, None], [1, BLOCK]), [BLOCK])
        for start in range(0, k, BLOCK):
            own = start + tl.arange(0, BLOCK)
            values = tl.load(x + own, mask=own < k, other=0.0).to(tl.float32)
            tl.store(codes + own, code_of(values, divisor, False), mask=own < k)


def groups_of(form: str, k: int) -> int:
    """Scales of a row of K columns."""
    return cdiv(k, GROUPS[form]) if GROUPS[form] else 1


def bytes_of(form: str, rows: int, k: int) -> int:
    """What `quantize` needs of memory."""
    return _chain.room((rows * k, 4 * rows * groups_of(form, k)))


def quantize(form: str, x: Tensor, room: Tensor) -> Rows:
    """x [R, K] with contiguous rows, quantized into `room`, uint8 [`bytes_of`] or more. No synchronisation."""
    import torch

    (rows, k), groups = x.shape, groups_of(form, x.shape[1])
    codes, scales = _chain.carve(room, x, (rows * k, 4 * rows * groups))
    made = Rows(codes.view(rows, k), scales.view(torch.float32).view(rows, groups))
    if rows:
        quantize_rows_kernel[(rows, cdiv(k, BLOCK) if GROUPS[form] else 1)](
            x,
            made.codes,
            made.scales,
            k,
            x.stride(0),
            groups,
            LEAST[form],
            BLOCK=BLOCK,
            GROUP=GROUPS[form],
            num_warps=4,
        )
    return Rows(made.codes.view(torch.float8_e4m3fn), made.scales)


def aot_case(form: str) -> AotCase:
    """The quantizer of a format, for the compile matrix."""
    types = {"x": "*bf16", "codes": "*u8", "scales": "*fp32"}
    types |= dict.fromkeys(("k", "stride", "groups"), "i32") | {"least": "fp32"}
    sizes = {"BLOCK": BLOCK, "GROUP": GROUPS[form]}
    return AotCase(f"quantize_{form}", quantize_rows_kernel, types, sizes, {"num_warps": 4}, ("k", "stride"))
