"""Launching grouped_linear over frag16 tiles on sm_80 and newer: argument checks and the call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernels.common import DTYPE_CODES, dtype_name, need
from gristmill.kernels.cuda_ptx import ptx_entry
from gristmill.kernels.linear.frag16_sm80._launch import FACTORED
from gristmill.kernels.moe.grouped_linear.frag16_sm80.args import ARGS
from gristmill.kernels.native import check

if TYPE_CHECKING:
    from gristmill.kernels.calls import GroupedLinearCall


def launch(config: Config, call: GroupedLinearCall) -> None:
    """Sorted rows [P, K], or rows that a permutation gathers, and the three tensors of a frag16 layout -> out [P, N or N / 2].

    Raises:
        ValueError: tensors that do not fit the configuration; rows of x that do not start at multiples of 16 bytes.
        RuntimeError: no driver, one that does not take the PTX, or another error of the driver.
    """
    x, (tiles, second, perm) = call.x, call.weight
    form, size, experts = (
        str(config["format"]),
        int(config["tile_bytes"]),
        call.expert_offsets.shape[0] - 1,
    )
    if form in FACTORED and second.dtype == torch.float32:  # K-quants have tiles of their own
        form, size = FACTORED[form]
    rows, n, k = call.out.shape[0], call.out.shape[1] * (2 if call.silu_mul else 1), x.shape[1]
    expected = experts * cdiv(n, 16) * cdiv(k, 128) * size
    need(
        tiles.numel() == expected,
        f"grouped_linear of {form}: expected {expected} bytes of tiles for {experts} experts of [{n}, {k}], got {tiles.numel()}",
    )
    need(not perm.numel(), f"grouped_linear of {form}: takes no weights with act-order")
    need(
        second.numel() in (0, experts * n),
        f"grouped_linear of {form}: expected {experts * n} row multipliers, got {second.numel()}",
    )
    need(
        x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0,
        f"grouped_linear of {form}: rows of x must be contiguous and start at multiples of 16 bytes, got strides {x.stride()}",
    )
    if rows == 0:
        return
    args = ARGS.new(x.get_device())  # pointers that are not set are null
    args.stream = torch.cuda.current_stream(x.device).cuda_stream
    args.y, args.x, args.ldx, args.w = call.out.data_ptr(), x.data_ptr(), x.stride(0), tiles.data_ptr()
    if call.bias is not None:
        args.bias = call.bias.data_ptr()
    if second.numel():
        args.row_scale = second.data_ptr()
    elif second.dtype != torch.float32:
        args.scale_type = DTYPE_CODES[dtype_name(second.dtype)]
    args.offsets = call.expert_offsets.data_ptr()
    if call.permutation is not None:
        args.permutation = call.permutation.data_ptr()
    args.rows, args.x_rows, args.experts, args.n, args.k = rows, x.shape[0], experts, n, k
    args.top_k, args.silu_mul, args.clamp = call.top_k, call.silu_mul, call.clamp
    args.alpha, args.limit = call.alpha, call.limit
    args.x_type = DTYPE_CODES[dtype_name(x.dtype)]
    args.mt, args.warps, args.grid = (int(config[name]) for name in ("mt", "warps", "grid"))
    check(ptx_entry(f"gm_grouped_linear_{form}_sm80", ARGS)(args), f"grouped_linear of {form}")
