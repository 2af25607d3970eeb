"""Launching grouped_linear over frag16 tiles: argument checks and the call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernels.common import DTYPE_CODES, dtype_name, need
from gristmill.kernels.moe.grouped_linear.frag16_sm90.args import ARGS
from gristmill.kernels.moe.grouped_linear.frag16_sm90.shapes import misfit
from gristmill.kernels.native import check, cuda_entry

if TYPE_CHECKING:
    from gristmill.kernels.calls import GroupedLinearCall


SHAPE = ("mt", "c", "slices", "ctas", "grid")
"""Entries of a configuration that are fields of `ARGS`."""


def launch(config: Config, call: GroupedLinearCall) -> None:
    """Sorted rows [P, K] and the three tensors of a frag16 layout -> out [P, N or N / 2]."""
    if call.bias is not None or call.clamp:
        raise ValueError(
            "grouped_linear_sm90 has no bias and no clamped activation; grouped_linear_w_triton does"
        )
    product(
        config,
        call.x,
        call.weight,
        call.expert_offsets,
        call.permutation,
        call.top_k,
        call.silu_mul,
        call.out,
        early=False,
        clear=True,
    )


def product(
    config: Config,
    x: Tensor,
    weight: list[Tensor],
    expert_offsets: Tensor,
    permutation: Tensor | None,
    top_k: int,
    silu_mul: bool,
    out: Tensor,
    *,
    early: bool,
    clear: bool,
) -> None:
    """One launch.

    ValueError for tensors that do not match the configuration, and for rows of x that do not start at multiples of 16 bytes.

    Args:
        early: the launch before this one read the same offsets.
        clear: rows past the last expert's become 0.
    """
    tiles, second, perm = weight
    form, experts = str(config["format"]), expert_offsets.shape[0] - 1
    n, k = out.shape[1] * (2 if silu_mul else 1), x.shape[1]
    expected = experts * cdiv(n, 16) * cdiv(k, 128) * int(config["tile_bytes"])
    if tiles.numel() != expected:
        raise ValueError(
            f"grouped_linear of {form}: expected {expected} bytes of tiles for {experts} experts of [{n}, {k}], "
            f"got {tiles.numel()}"
        )
    if perm.numel():
        raise ValueError(f"grouped_linear of {form}: takes no weights with act-order")
    if second.numel() not in (0, experts * n):
        raise ValueError(
            f"grouped_linear of {form}: expected {experts * n} row multipliers, got {second.numel()}"
        )
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        raise ValueError(
            f"grouped_linear of {form}: rows of x must be contiguous and start at multiples of 16 bytes, got strides "
            f"{x.stride()}"
        )
    if out.shape[0] == 0:
        return
    args = ARGS.new(x.get_device())  # pointers that are not set are null
    args.stream = torch.cuda.current_stream(x.device).cuda_stream
    args.y = out.data_ptr()
    args.x = x.data_ptr()
    args.ldx = x.stride(0)
    args.w = tiles.data_ptr()
    if second.numel():
        args.row_scale = second.data_ptr()
    elif second.dtype != torch.float32:
        args.scale_type = DTYPE_CODES[dtype_name(second.dtype)]
    args.offsets = expert_offsets.data_ptr()
    if permutation is not None:
        args.permutation = permutation.data_ptr()
    args.rows = out.shape[0]
    args.x_rows = x.shape[0]
    args.experts = experts
    args.n = n
    args.k = k
    args.top_k = top_k
    args.silu_mul = silu_mul
    args.x_type = DTYPE_CODES[dtype_name(x.dtype)]
    args.pdl = 1
    args.early = early
    args.clear = clear
    for name in SHAPE:
        setattr(args, name, int(config[name]))
    entry = cuda_entry(f"gm_grouped_linear_{config['format']}_sm90", ARGS)
    if code := entry(args):
        reason = misfit(args.slices, args.c, k, silu_mul)
        need(reason is None, f"grouped_linear of {form}: {reason}")
        check(code, f"grouped_linear of {form}")
