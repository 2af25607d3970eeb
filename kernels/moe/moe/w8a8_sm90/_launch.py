"""Launching products of experts with 8-bit activations: argument checks and the calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import BLOCK, cdiv
from gristmill.kernels.common import DTYPE_CODES, dtype_name
from gristmill.kernels.linear.w8a8_sm90.shapes import Operands
from gristmill.kernels.moe.moe.w8a8_sm90.args import ARGS, PLACE, QUANTIZE
from gristmill.kernels.moe.moe.w8a8_sm90.shapes import scale_pitch
from gristmill.kernels.native import check, cuda_entry

SHAPE = ("tile_a", "tile_b", "plain", "slots", "ctas", "grid")
"""Entries of a configuration that are fields of `ARGS`."""


class Sorted(NamedTuple):
    """Where rows go: ids [T, top_k], and of permute offsets [experts + 1] and inverse [T * top_k], all int32."""

    ids: Tensor
    offsets: Tensor
    inverse: Tensor

    @property
    def experts(self) -> int:
        """Experts of this rank."""
        return self.offsets.shape[0] - 1


def quantize(
    operands: Operands, x: Tensor, order: Sorted, k: int, codes: Tensor, scales: Tensor, *, gated: bool
) -> None:
    """x [T, K], or gated gate and up [T * top_k, 2 K] sorted by expert -> codes [T * top_k, K] and scales in the order of experts.

    Gated values are silu(gate) · up in float32, rounded to x's dtype. Rows of no expert are not written.
    """
    tokens, top_k = order.ids.shape
    device = x.get_device()
    args = QUANTIZE.new(device, tokens, top_k, k, order.experts, gated, operands.blocks)
    args.type, args.stream = DTYPE_CODES[dtype_name(x.dtype)], torch.cuda.current_stream(device).cuda_stream
    args.codes, args.scales, args.x, args.ldx = codes.data_ptr(), scales.data_ptr(), x.data_ptr(), x.stride(0)
    args.ids, args.inverse = order.ids.data_ptr(), order.inverse.data_ptr()
    args.offsets = order.offsets.data_ptr()
    check(cuda_entry("gm_moe_quantize_sm90", QUANTIZE)(args), "moe_quantize")


def place_codes(
    operands: Operands, given: Tensor, given_scales: Tensor, order: Sorted, codes: Tensor, scales: Tensor
) -> None:
    """Given codes [T, K] and scales [T, groups] -> codes [T * top_k, K] and scales in the order of experts."""
    (tokens, top_k), k, device = order.ids.shape, given.shape[1], given.get_device()
    args = PLACE.new(device, tokens, top_k, k, order.experts, cdiv(k, BLOCK) if operands.blocks else 0)
    args.stream = torch.cuda.current_stream(device).cuda_stream
    args.codes, args.scales = codes.data_ptr(), scales.data_ptr()
    args.given, args.given_scales = given.data_ptr(), given_scales.data_ptr()
    args.given_stride, (args.row_stride, args.group_stride) = given.stride(0), given_scales.stride()
    args.ids, args.inverse = order.ids.data_ptr(), order.inverse.data_ptr()
    args.offsets = order.offsets.data_ptr()
    check(cuda_entry("gm_moe_place_codes_sm90", PLACE)(args), "moe_place_codes")


def check_weight(operands: Operands, weight: list[Tensor], experts: int, n: int, k: int) -> None:
    """ValueError unless the six tensors of plain_v1 are [experts, n, k] weights of the operands, with columns in order."""
    codes, scales, _, _, row_block, perm = weight
    if tuple(codes.shape) != (experts, n, k) or perm.numel():
        raise ValueError(
            f"moe_w8a8_sm90: expected codes [{experts}, {n}, {k}] in the order of x's columns, got {list(codes.shape)}"
            + (" and a permutation" if perm.numel() else "")
        )
    if operands.blocks:
        fits = scales.dim() == 3 and scales.shape[2] == cdiv(k, BLOCK) and row_block.numel() == n
        expected = f"[{experts}, block rows, {cdiv(k, BLOCK)}] with a block row for each of {n} rows"
    else:
        fits, expected = scales.numel() == experts * n, f"one for each of {experts} times {n} rows"
    if not fits or scales.shape[0] != experts:
        raise ValueError(
            f"moe_w8a8_sm90: expected scales {expected}, got {list(scales.shape)} and {row_block.numel()} block rows"
        )


def product(
    operands: Operands,
    shape: Mapping[str, int],
    codes: Tensor,
    scales: Tensor,
    weight: list[Tensor],
    offsets: Tensor,
    out: Tensor,
) -> None:
    """One launch: sorted codes [P, K] and their scales, [E, N, K] weights in plain_v1 -> out [P, N]; rows of no expert are not written.

    The launch before this one must have waited for the one that wrote the offsets.
    """
    w, w_scales, _, _, row_block, _ = weight
    args = ARGS.new(out.get_device(), torch.cuda.current_stream(out.device).cuda_stream)
    args.y, args.x, args.w = out.data_ptr(), codes.data_ptr(), w.data_ptr()
    args.x_scale, args.w_scale = scales.data_ptr(), w_scales.data_ptr()
    args.w_type = DTYPE_CODES[dtype_name(w_scales.dtype)]
    if operands.blocks:
        args.row_block, args.block_rows = row_block.data_ptr(), w_scales.shape[1]
    args.offsets = offsets.data_ptr()
    args.rows, args.n = out.shape
    args.experts, args.k, args.pdl = offsets.shape[0] - 1, codes.shape[1], 1
    args.x_pitch = scale_pitch(operands, args.rows, args.experts)
    args.y_type = DTYPE_CODES[dtype_name(out.dtype)]
    for name in SHAPE:
        setattr(args, name, shape[name])
    entry = cuda_entry(f"gm_grouped_w8a8_{operands.format}_sm90", ARGS)
    check(entry(args), "moe_w8a8_sm90")
