"""Launching linear with int8 activations on sm_80 and newer: x is quantized in one launch and multiplied in the next (`product.cuh`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.common import DTYPE_CODES, dtype_name, need, need_workspace, row_stride
from gristmill.kernels.cuda_ptx import ptx_entry
from gristmill.kernels.linear._epilogue import finish
from gristmill.kernels.linear.frag16_sm80.gemm import COUNTER_BYTES
from gristmill.kernels.linear.w8a8_sm80.args import ARGS, QUANTIZE
from gristmill.kernels.linear.w8a8_sm80.shapes import room_of
from gristmill.kernels.native import check

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearCall

NAME = "linear_w8a8_sm80"


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K] fp16 or bf16, the six tensors of plain_v1 -> out [..., N or N / 2].

    Raises:
        ValueError: tensors that are not those of an int8 weight in the order of x's columns, or a workspace that is too small.
        RuntimeError: no driver, one that does not take the PTX, or another error of the driver.
    """
    x, (codes, scales, _, _, _, perm) = call.x, call.weight
    k, rows = x.shape[-1], call.out.shape[-1] * (2 if call.silu_mul else 1)
    m = x.numel() // k
    need(
        tuple(codes.shape) == (rows, k) and not perm.numel(),
        f"{NAME}: expected codes [{rows}, {k}] in the order of x's columns, got {list(codes.shape)}"
        + (" and a permutation" if perm.numel() else ""),
    )
    need(
        scales.numel() == rows,
        f"{NAME}: expected one scale for each of {rows} rows, got {list(scales.shape)}",
    )
    if m == 0:
        return
    room = room_of(config, m, k, rows if call.silu_mul else 0, call.codes is not None)
    workspace = call.workspace
    if workspace is None:
        workspace = torch.empty(room.size, dtype=torch.uint8, device=x.device)
        workspace[:COUNTER_BYTES].zero_()
    need_workspace("linear", workspace, room.size, x.device)
    device, start = x.get_device(), workspace.data_ptr()
    args = ARGS.new(device, torch.cuda.current_stream(device).cuda_stream)
    args.counters, args.sums = start, start + room.sums
    if call.codes is None or call.scales is None:
        _quantize(x, m, k, start + room.codes, start + room.scales)
        args.x, args.ldx, args.x_scale = start + room.codes, k, start + room.scales
    else:
        given, by_row = _aligned(call.codes, m, k), call.scales.reshape(m).contiguous()
        args.x, args.ldx, args.x_scale = given.data_ptr(), given.stride(0), by_row.data_ptr()
    # Gate and up are computed by different CTAs, so silu_mul follows in a launch of its own.
    out = call.out.view(m, rows) if not call.silu_mul else _gated(workspace, room.gated, m, rows, x.dtype)
    args.y, args.w, args.w_scale = out.data_ptr(), codes.data_ptr(), scales.data_ptr()
    if call.bias is not None:
        args.bias = call.bias.data_ptr()
    if call.residual is not None and not call.silu_mul:
        args.residual = call.residual.data_ptr()
    args.m, args.n, args.k = m, rows, k
    args.y_type, args.w_type = DTYPE_CODES[dtype_name(x.dtype)], DTYPE_CODES[dtype_name(scales.dtype)]
    for name, value in config.items():
        setattr(args, name, value)
    check(ptx_entry("gm_w8a8_linear_sm80", ARGS)(args), NAME)
    if call.silu_mul:
        # the kernel has added the bias
        finish(out.view(*call.out.shape[:-1], rows), None, call.residual, True, call.out)


def _quantize(x: Tensor, m: int, k: int, codes: int, scales: int) -> None:
    """The codes and scales of x's M rows, to these addresses."""
    stride = row_stride(x)
    if stride % 8 or stride < k or x.data_ptr() % 16:
        x, stride = x.reshape(m, k).clone(memory_format=torch.contiguous_format), k
    device = x.get_device()
    stream = torch.cuda.current_stream(device).cuda_stream
    args = QUANTIZE.new(device, m, k, DTYPE_CODES[dtype_name(x.dtype)], stream, codes, scales)
    args.x, args.ldx = x.data_ptr(), stride
    check(ptx_entry("gm_quantize_int8_sm80", QUANTIZE)(args), "quantize_int8_sm80")


def _aligned(codes: Tensor, m: int, k: int) -> Tensor:
    """Given codes [..., K] as [M, K] whose rows copies of 16 bytes can read."""
    rows = codes.reshape(m, k)
    step, one = rows.stride()
    fits = one == 1 and step >= k and step % 16 == 0 and rows.data_ptr() % 16 == 0
    return rows if fits else rows.clone(memory_format=torch.contiguous_format)


def _gated(workspace: Tensor, start: int, m: int, rows: int, dtype: torch.dtype) -> Tensor:
    """[M, rows] from byte `start` of a workspace on."""
    return workspace[start : start + 2 * m * rows].view(dtype).view(m, rows)
