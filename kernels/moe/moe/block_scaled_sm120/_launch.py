"""Launching products of experts on block-scaled codes for sm_120 and sm_121: rows of x are quantized, then multiplied (`grouped.cuh`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernels.common import DTYPE_CODES, dtype_name
from gristmill.kernels.cuda_ptx import ptx_entry
from gristmill.kernels.linear._plain_blocks import need_blocks
from gristmill.kernels.linear.block_scaled_sm120._launch import ARCH, Places, quantize
from gristmill.kernels.moe.moe.block_scaled_sm120.args import ARGS
from gristmill.kernels.native import check

if TYPE_CHECKING:
    from gristmill.kernels.calls import GroupedLinearCall


def product(config: Config, room: Sequence[Tensor], call: GroupedLinearCall) -> None:
    """Rows [R, K] fp16 or bf16, in the order of experts or gathered by a permutation, six tensors of plain_v1 -> out [P, N or N / 2].

    Rows of no expert are not written.

    Args:
        room: bytes for the codes, scales and factors of the R rows.

    Raises:
        ValueError: tensors that are not those of a weight in the format, or in another order than x's columns.
        RuntimeError: no driver, one that does not take the PTX, or another error of the driver.
    """
    x, (codes, scales, _, row_scale, _, _) = call.x, call.weight
    form, (given, k), experts = str(config["format"]), x.shape, call.expert_offsets.shape[0] - 1
    (rows, columns), scheme = call.out.shape, QuantScheme.parse(form)
    n, name = columns * (2 if call.silu_mul else 1), f"moe of {form}"
    need_blocks(name, scheme, call.weight, (experts, n), k)
    if rows == 0:
        return
    places = Places(*(part.data_ptr() if part.numel() else 0 for part in room))
    quantize(x, form, given, places, by_row=True)
    device = x.get_device()
    args = ARGS.new(device, torch.cuda.current_stream(device).cuda_stream)
    args.y, args.x, args.w = call.out.data_ptr(), places.codes, codes.data_ptr()
    args.x_scale, args.w_scale = places.scales, scales.data_ptr()
    if scheme.has_global:
        args.x_factor, args.w_factor = places.factor, row_scale.data_ptr()
    if call.bias is not None:
        args.bias = call.bias.data_ptr()
    args.offsets = call.expert_offsets.data_ptr()
    if call.permutation is not None:
        args.permutation = call.permutation.data_ptr()
    args.rows, args.experts, args.n, args.k, args.top_k = rows, experts, n, k, call.top_k
    args.silu_mul, args.clamp, args.alpha, args.limit = call.silu_mul, call.clamp, call.alpha, call.limit
    args.y_type = DTYPE_CODES[dtype_name(x.dtype)]
    args.mt, args.warps, args.grid = (int(config[field]) for field in ("mt", "warps", "grid"))
    check(ptx_entry(f"gm_grouped_{form}_sm120f", ARGS, ARCH)(args), name)
