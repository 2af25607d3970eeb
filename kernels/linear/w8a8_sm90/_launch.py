"""Launching linear with 8-bit activations on Hopper: x is quantized in one launch and multiplied in the next (`product.cuh`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import BLOCK, cdiv
from gristmill.kernels.common import DTYPE_CODES, dtype_name, need_workspace, row_stride
from gristmill.kernels.linear._epilogue import finish
from gristmill.kernels.linear.w8a8_sm90.args import ARGS, QUANTIZE
from gristmill.kernels.linear.w8a8_sm90.shapes import Operands, operands_of, workspace_bytes
from gristmill.kernels.native import check, cuda_entry

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearCall


class Rows(NamedTuple):
    """Quantized rows of x in the workspace: codes [M, K], float32 scales ([M], or [blocks of K, pitch]), int32 sums [M] of int8 codes."""

    codes: int
    scales: int
    sums: int
    pitch: int


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K] fp16 or bf16, the six tensors of plain_v1 -> out [..., N or N / 2]."""
    workspace = call.workspace
    codes, scales, _, _, row_block, perm = call.weight
    operands, k = operands_of(str(config["format"])), call.x.shape[-1]
    rows = call.out.shape[-1] * (2 if call.silu_mul else 1)
    m = call.x.numel() // k
    if tuple(codes.shape) != (rows, k) or perm.numel():
        raise ValueError(
            f"linear_w8a8_sm90: expected codes [{rows}, {k}] in the order of x's columns, got {list(codes.shape)}"
            + (" and a permutation" if perm.numel() else "")
        )
    _check_scales(operands, scales, row_block, rows, k)
    if m == 0:
        return
    size = workspace_bytes(operands, m, k, rows if call.silu_mul else 0, given=call.codes is not None)
    if workspace is None:
        workspace = torch.empty(size, dtype=torch.uint8, device=call.x.device)
    else:
        need_workspace("linear", workspace, size, call.x.device)
    device = call.x.get_device()
    stream = torch.cuda.current_stream(device).cuda_stream
    if call.codes is None or call.scales is None:
        quantized = quantize_rows(operands, call.x, m, k, workspace, device, stream)
    else:
        given = call.codes.reshape(m, k).contiguous(), pitched(operands, call.scales)
        quantized = Rows(given[0].data_ptr(), given[1].data_ptr(), 0, given[1].stride(-1))
    target = (
        call.out.view(m, rows) if not call.silu_mul else gated_rows(workspace, size, m, rows, call.x.dtype)
    )
    multiply(
        config, quantized, k, call.weight, call.bias, None if call.silu_mul else call.residual, target, stream
    )
    if call.silu_mul:
        finish(target.view(*call.out.shape[:-1], rows), None, call.residual, True, call.out)


def pitched(operands: Operands, scales: Tensor) -> Tensor:
    """Given scales [rows, groups] as the product reads them: one for each row in order, those of further groups `pitch` floats further on.
    So `layers.codes` allocates them; others are copied."""
    rows, groups = scales.shape
    first, pitch = scales.stride()
    if operands.blocks:
        fits = pitch >= rows and pitch % 4 == 0 and scales.data_ptr() % 16 == 0
    else:
        fits = groups == 1
    if fits and (first == 1 or rows == 1):
        return scales
    copy = scales.new_empty(groups, cdiv(rows, 4) * 4).T[:rows]
    return copy.copy_(scales)


def gated_rows(workspace: Tensor, size: int, m: int, rows: int, dtype: torch.dtype) -> Tensor:
    """[M, rows] at the end of a workspace of `size` bytes: gate and up are computed by different CTAs, so silu_mul follows in a
    launch of its own."""
    return workspace[size - 2 * m * rows : size].view(dtype).view(m, rows)


def multiply(
    config: Config,
    quantized: Rows,
    k: int,
    weight: list[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    stream: int,
) -> None:
    """The product of quantized rows of x [M, K] and the tensors of plain_v1 -> out [M, N], bias and residual added."""
    codes, scales, _, _, row_block, _ = weight
    args = ARGS.new(out.get_device(), stream, out.data_ptr(), quantized.codes, k)
    args.w = codes.data_ptr()
    args.x_scale, args.x_sum, args.x_pitch = quantized.scales, quantized.sums, quantized.pitch
    args.w_scale, args.w_type = scales.data_ptr(), DTYPE_CODES[dtype_name(scales.dtype)]
    if row_block.numel():
        args.row_block = row_block.data_ptr()
    if bias is not None:
        args.bias = bias.data_ptr()
    if residual is not None:
        args.residual = residual.data_ptr()
    args.m, args.n, args.k, args.pdl = *out.shape, k, 1
    args.y_type = DTYPE_CODES[dtype_name(out.dtype)]
    for name in ("rows", "columns", "plain", "slots", "split", "ctas", "band", "grid"):
        setattr(args, name, config[name])
    entry = cuda_entry(f"gm_linear_w8a8_{config['format']}_sm90", ARGS)
    check(entry(args), "linear_w8a8_sm90")


def quantize_rows(
    operands: Operands, x: Tensor, m: int, k: int, workspace: Tensor, device: int, stream: int
) -> Rows:
    """x's M rows in the format of the operands, into a workspace of `workspace_bytes`."""
    stride = row_stride(x)
    if stride % 8 or stride < k or x.data_ptr() % 16:
        x, stride = x.reshape(m, k).contiguous(), k
    start = workspace.data_ptr()
    scales = start + cdiv(m * k, 16) * 16
    pitch = cdiv(m, 4) * 4
    rows = Rows(start, scales, scales + 4 * pitch if operands.sums else 0, pitch)
    args = QUANTIZE.new(
        device, m, k, pitch, operands.code, DTYPE_CODES[dtype_name(x.dtype)], stream, *rows[:3]
    )
    args.x, args.ldx = x.data_ptr(), stride
    check(cuda_entry("gm_quantize_rows_sm90", QUANTIZE)(args), "quantize_rows")
    return rows


def _check_scales(operands: Operands, scales: Tensor, row_block: Tensor, rows: int, k: int) -> None:
    """ValueError unless the scales are those of [rows, k] codes."""
    if operands.blocks:
        fits = scales.dim() == 2 and scales.shape[1] == cdiv(k, BLOCK) and row_block.numel() == rows
        expected = f"[block rows, {cdiv(k, BLOCK)}] with a block row for each of {rows} rows"
    else:
        fits, expected = scales.numel() == rows, f"one for each of {rows} rows"
    if not fits:
        raise ValueError(
            f"linear_w8a8_sm90: expected scales {expected}, got {list(scales.shape)} and {row_block.numel()} block rows"
        )
