"""Launching linear over block-scaled codes on sm_120 and sm_121: x is quantized, then multiplied (`product.cuh`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernels.common import DTYPE_CODES, dtype_name, need_workspace, row_stride
from gristmill.kernels.cuda_ptx import ptx_entry
from gristmill.kernels.linear._epilogue import finish
from gristmill.kernels.linear._plain_blocks import need_blocks
from gristmill.kernels.linear.block_scaled_sm120.args import ARGS, QUANTIZE
from gristmill.kernels.linear.block_scaled_sm120.shapes import room_of
from gristmill.kernels.linear.frag16_sm80.gemm import COUNTER_BYTES
from gristmill.kernels.native import check

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearCall

ARCH = "compute_120f"
"""The family of sm_120: its PTX has the block-scaled instruction, which that of compute_120 lacks."""
FORMATS = {"nvfp4": 0, "mxfp4": 1, "mxfp8": 2}
"""As the quantizer numbers them."""


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K] fp16 or bf16, the six tensors of plain_v1 -> out [..., N or N / 2].

    Raises:
        ValueError: tensors that are not those of a weight in the format, or in another order than x's columns; a workspace that is too small.
        RuntimeError: no driver, one that does not take the PTX, or another error of the driver.
    """
    x, (codes, scales, _, row_scale, _, _) = call.x, call.weight
    form, k = str(config["format"]), x.shape[-1]
    rows, m = call.out.shape[-1] * (2 if call.silu_mul else 1), x.numel() // x.shape[-1]
    scheme, name = QuantScheme.parse(form), f"linear of {form}"
    need_blocks(name, scheme, call.weight, (rows,), k)
    if m == 0:
        return
    room = room_of(config, m, k, rows if call.silu_mul else 0)
    workspace = call.workspace
    if workspace is None:
        workspace = torch.empty(room.size, dtype=torch.uint8, device=x.device)
        workspace[:COUNTER_BYTES].zero_()
    need_workspace("linear", workspace, room.size, x.device)
    start = workspace.data_ptr()
    places = Places(start + room.codes, start + room.scales)
    if scheme.has_global:
        places = places._replace(factor=start + room.factor, maxima=start + room.maxima)
    quantize(x, form, m, places)
    device = x.get_device()
    args = ARGS.new(device, torch.cuda.current_stream(device).cuda_stream)
    args.counters, args.sums = start, start + room.sums
    args.x, args.x_scale, args.w, args.w_scale = (
        start + room.codes,
        start + room.scales,
        codes.data_ptr(),
        scales.data_ptr(),
    )
    if scheme.has_global:
        args.x_factor, args.w_factor = start + room.factor, row_scale.data_ptr()
    # Gate and up are computed by different CTAs, so silu_mul follows in a launch of its own.
    out = call.out.view(m, rows) if not call.silu_mul else _gated(workspace, room.gated, m, rows, x.dtype)
    args.y = out.data_ptr()
    if call.bias is not None:
        args.bias = call.bias.data_ptr()
    if call.residual is not None and not call.silu_mul:
        args.residual = call.residual.data_ptr()
    args.m, args.n, args.k, args.y_type = m, rows, k, DTYPE_CODES[dtype_name(x.dtype)]
    for field in ("mt", "warps", "grid", "share"):
        setattr(args, field, config[field])
    check(ptx_entry(f"gm_linear_{form}_sm120f", ARGS, ARCH)(args), name)
    if call.silu_mul:
        # the kernel has added the bias
        finish(out.view(*call.out.shape[:-1], rows), None, call.residual, True, call.out)


class Places(NamedTuple):
    """Addresses: of codes, of scales, of the factor or factors of nvfp4, and of the maxima of its one factor."""

    codes: int
    scales: int
    factor: int = 0
    maxima: int = 0


def quantize(x: Tensor, form: str, m: int, to: Places, *, by_row: bool = False) -> None:
    """The codes and scales of x's M rows, and of nvfp4 the factor of all of them, or `by_row` one for each."""
    k, stride = x.shape[-1], row_stride(x)
    if stride % 8 or stride < k or x.data_ptr() % 16:
        x, stride = x.reshape(m, k).clone(memory_format=torch.contiguous_format), k
    device = x.get_device()
    args = QUANTIZE.new(device, m, k, DTYPE_CODES[dtype_name(x.dtype)], FORMATS[form])
    args.by_row = by_row and form == "nvfp4"
    args.stream = torch.cuda.current_stream(device).cuda_stream
    args.codes, args.scales, args.factor, args.maxima = to
    args.x, args.ldx = x.data_ptr(), stride
    check(ptx_entry("gm_quantize_blocks_sm120f", QUANTIZE, ARCH)(args), f"quantizing to {form}")


def _gated(workspace: Tensor, start: int, m: int, rows: int, dtype: torch.dtype) -> Tensor:
    """[M, rows] from byte `start` of a workspace on."""
    return workspace[start : start + 2 * m * rows].view(dtype).view(m, rows)
