"""Launching linear with 8-bit activations by mma.sync: x is quantized in one launch and multiplied in the next (`product.cuh`)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import BLOCK, cdiv
from gristmill.kernels.common import DTYPE_CODES, dtype_name, need, need_workspace, row_stride
from gristmill.kernels.linear._epilogue import finish
from gristmill.kernels.linear.frag16_sm80.gemm import COUNTER_BYTES
from gristmill.kernels.linear.w8a8_sm80.args import ARGS, QUANTIZE, QUANTIZE_FP8
from gristmill.kernels.linear.w8a8_sm80.shapes import OPERANDS, Room, pitch_of, room_of
from gristmill.kernels.native import check

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearCall

PARTITION = ("mt", "warps", "grid", "share")
"""What a configuration says beside the operands."""
FP8_FORMATS = {"fp8_token": 0, "fp8_g128": 1, "fp8": 2}
"""The formats of GmQuantizeFp8Sm89Args."""
Entry = Callable[[ctypes.Structure], int]


class Rows(NamedTuple):
    """Rows of x, [M, K] `ldx` elements apart, as the quantizers read them, and the addresses that they write to."""

    x: Tensor
    m: int
    k: int
    ldx: int
    x_type: int
    device: int
    stream: int
    codes: int
    scales: int
    maxima: int


def run(
    config: Config, call: LinearCall, product: Callable[[], Entry], quantize: Callable[[Config, Rows], None]
) -> None:
    """x [..., K] fp16 or bf16, the six tensors of plain_v1 -> out [..., N or N / 2].

    Args:
        product: the entry that multiplies, of the library that has it.
        quantize: quantizes rows of x in the activation format of the configuration.

    Raises:
        ValueError: tensors that are not those of a weight in the format of the configuration, in the order of x's columns, or a workspace that
            is too small.
        NativeLibraryError: this build has no such library.
        RuntimeError: no driver, one that does not take the PTX, or another error of the driver.
    """
    x, (codes, scales, _, _, row_block, perm) = call.x, call.weight
    operands, name = OPERANDS[str(config["format"])], f"linear in {config['format']}"
    k, rows = x.shape[-1], call.out.shape[-1] * (2 if call.silu_mul else 1)
    m = x.numel() // k
    need(
        tuple(codes.shape) == (rows, k) and not perm.numel(),
        f"{name}: expected codes [{rows}, {k}] in the order of x's columns, got {list(codes.shape)}"
        + (" and a permutation" if perm.numel() else ""),
    )
    if operands.blocks:
        need(
            scales.dim() == 2 and scales.shape[1] == cdiv(k, BLOCK) and row_block.numel() == rows,
            f"{name}: expected scales [block rows, {cdiv(k, BLOCK)}] with a block row for each of {rows} rows, "
            f"got {list(scales.shape)} and {row_block.numel()} block rows",
        )
    else:
        need(
            scales.numel() == rows,
            f"{name}: expected one scale for each of {rows} rows, got {list(scales.shape)}",
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
    args.x_step = 0 if config["activation"] == "fp8" else 1
    if call.codes is None or call.scales is None:
        quantize(config, rows_of(x, m, k, start, room))
        args.x, args.ldx, args.x_scale = start + room.codes, k, start + room.scales
        args.x_pitch = pitch_of(m)
    else:
        given = _aligned(call.codes, m, k)
        of_x = _pitched(call.scales) if operands.blocks else call.scales.reshape(-1).contiguous()
        args.x, args.ldx, args.x_scale = given.data_ptr(), given.stride(0), of_x.data_ptr()
        args.x_pitch = of_x.stride(-1)
    # Gate and up are computed by different CTAs, so silu_mul follows in a launch of its own.
    out = call.out.view(m, rows) if not call.silu_mul else _gated(workspace, room.gated, m, rows, x.dtype)
    args.y, args.w, args.w_scale = out.data_ptr(), codes.data_ptr(), scales.data_ptr()
    if operands.blocks:
        args.row_block = row_block.data_ptr()
    if call.bias is not None:
        args.bias = call.bias.data_ptr()
    if call.residual is not None and not call.silu_mul:
        args.residual = call.residual.data_ptr()
    args.m, args.n, args.k = m, rows, k
    args.y_type, args.w_type = DTYPE_CODES[dtype_name(x.dtype)], DTYPE_CODES[dtype_name(scales.dtype)]
    for part in PARTITION:
        setattr(args, part, config[part])
    check(product()(args), name)
    if call.silu_mul:
        # the kernel has added the bias
        finish(out.view(*call.out.shape[:-1], rows), None, call.residual, True, call.out)


def rows_of(x: Tensor, m: int, k: int, start: int, room: Room) -> Rows:
    """x's M rows, copied if loads of 16 bytes cannot read them, and their places in a workspace that begins at the address `start`."""
    stride = row_stride(x)
    if stride % 8 or stride < k or x.data_ptr() % 16:
        x, stride = x.reshape(m, k).clone(memory_format=torch.contiguous_format), k
    device = x.get_device()
    stream = torch.cuda.current_stream(device).cuda_stream
    places = start + room.codes, start + room.scales, start + room.maxima
    return Rows(x, m, k, stride, DTYPE_CODES[dtype_name(x.dtype)], device, stream, *places)


def quantize_to_fp8(entry: Entry, form: str, rows: Rows) -> None:
    """e4m3 codes, and scales of an activation format: of each row, of each 128 columns of one, or, M times, of all rows."""
    args = QUANTIZE_FP8.new(
        rows.device, rows.m, rows.k, FP8_FORMATS[form], pitch_of(rows.m), rows.x_type, rows.stream
    )
    args.codes, args.scales, args.maxima = rows.codes, rows.scales, rows.maxima
    args.x, args.ldx = rows.x.data_ptr(), rows.ldx
    check(entry(args), "quantize_fp8")


def quantize_to_int8(entry: Entry, rows: Rows) -> None:
    """Codes and a scale for each row of x."""
    args = QUANTIZE.new(rows.device, rows.m, rows.k, rows.x_type, rows.stream, rows.codes, rows.scales)
    args.x, args.ldx = rows.x.data_ptr(), rows.ldx
    check(entry(args), "quantize_int8")


def _aligned(codes: Tensor, m: int, k: int) -> Tensor:
    """Given codes [..., K] as [M, K] whose rows copies of 16 bytes can read."""
    rows = codes.reshape(m, k)
    step, one = rows.stride()
    fits = one == 1 and step >= k and step % 16 == 0 and rows.data_ptr() % 16 == 0
    return rows if fits else rows.clone(memory_format=torch.contiguous_format)


def _pitched(scales: Tensor) -> Tensor:
    """Given scales [rows, groups] with those of a group behind each other, groups a multiple of 16 bytes apart, as `layers.codes` allocates
    them; others are copied."""
    rows, groups = scales.shape
    first, pitch = scales.stride()
    fits = (first == 1 or rows == 1) and pitch >= rows and pitch % 4 == 0 and scales.data_ptr() % 16 == 0
    return scales if fits else scales.new_empty(groups, cdiv(rows, 4) * 4).T[:rows].copy_(scales)


def _gated(workspace: Tensor, start: int, m: int, rows: int, dtype: torch.dtype) -> Tensor:
    """[M, rows] from byte `start` of a workspace on."""
    return workspace[start : start + 2 * m * rows].view(dtype).view(m, rows)
