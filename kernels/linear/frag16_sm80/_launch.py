"""Launching linear over frag16 tiles on sm_80 and newer: argument checks and the call, shared by the schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernels.common import DTYPE_CODES, dtype_name, need, need_workspace, row_stride
from gristmill.kernels.cuda_ptx import ptx_entry
from gristmill.kernels.linear.frag16_sm80.args import ARGS
from gristmill.kernels.linear.frag16_sm80.formats import FORMATS
from gristmill.kernels.linear.frag16_sm90.args import GATHER
from gristmill.kernels.native import check

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearCall

DESCRIPTIVE = ("format", "tile_bytes")
"""Entries of a configuration that are not fields of `ARGS`."""
FACTORED = {
    plain.name: (form.name, form.tile_bytes)
    for form in FORMATS
    for plain in FORMATS
    if form.factored and not plain.factored and plain.schemes == form.schemes
}
"""By the format of 16-bit scales, that of products: name and bytes of a tile."""


def run(
    schedule: str, config: Config, call: LinearCall, workspace_bytes: int, counter_bytes: int, aligned: bool
) -> None:
    """x [..., K] and the three tensors of a frag16 layout -> out [..., N or N / 2].

    A workspace of `workspace_bytes` starts with `counter_bytes` of counters; `aligned`: rows of x have to be 16-byte aligned.

    Raises:
        ValueError: tensors that do not fit the configuration, or a workspace that is too small.
        RuntimeError: no driver, one that does not take the PTX, or another error of the driver.
    """
    x, (tiles, second, perm) = call.x, call.weight
    form, size, rows = (
        str(config["format"]),
        int(config["tile_bytes"]),
        call.out.shape[-1] * (2 if call.silu_mul else 1),
    )
    if (
        form in FACTORED and second.dtype == torch.float32
    ):  # K-quants have another tile than 16-bit scales of their scheme
        form, size = FACTORED[form]
    k, m = perm.numel() or x.shape[-1], x.numel() // x.shape[-1]
    expected = cdiv(rows, 16) * cdiv(k, 128) * size
    need(
        tiles.numel() == expected,
        f"linear of {form}: expected {expected} bytes of tiles for a [{rows}, {k}] weight, got {tiles.numel()}",
    )
    row_scale = second.data_ptr() if second.numel() else None
    need(
        row_scale is None or second.numel() == rows,
        f"linear of {form}: expected {rows} row multipliers, got {second.numel()}",
    )
    if m == 0:
        return
    device = x.get_device()
    stream = torch.cuda.current_stream(device).cuda_stream
    stride = row_stride(x)
    if perm.numel():
        x, stride = _gathered(x, stride, perm, m, device, stream), k
    if aligned and (stride % 8 or x.data_ptr() % 16):
        copy = torch.empty(m, cdiv(k, 8) * 8, dtype=x.dtype, device=x.device)
        copy[:, :k] = x.reshape(m, k)
        x, stride = copy, copy.shape[1]
    # Gate and up are computed by different CTAs, so silu_mul follows in a launch of its own.
    target = torch.empty(m, rows, dtype=x.dtype, device=x.device) if call.silu_mul else call.out
    args = ARGS.new(device, stream, target.data_ptr(), x.data_ptr(), stride, tiles.data_ptr())
    if call.bias is not None:
        args.bias = call.bias.data_ptr()
    if call.residual is not None and not call.silu_mul:
        args.residual = call.residual.data_ptr()
    args.row_scale = row_scale
    args.m, args.n, args.k = m, rows, k
    args.x_type = DTYPE_CODES[dtype_name(x.dtype)]
    args.scale_type = (
        DTYPE_CODES[dtype_name(second.dtype)] if row_scale is None and second.dtype != torch.float32 else 0
    )
    for name, value in config.items():
        if name not in DESCRIPTIVE:
            setattr(args, name, value)
    if workspace_bytes:
        workspace = call.workspace
        if workspace is None:
            workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=x.device)
            workspace[:counter_bytes].zero_()
        need_workspace("linear", workspace, workspace_bytes, x.device)
        args.counters, args.sums = workspace.data_ptr(), workspace.data_ptr() + counter_bytes
    check(ptx_entry(f"gm_linear_{form}_{schedule}_sm80", ARGS)(args), f"linear of {form}")
    if call.silu_mul:
        from gristmill.kernels.linear._epilogue import finish

        # the kernel has added the bias
        finish(target.view(*call.out.shape[:-1], rows), None, call.residual, True, call.out)


def _gathered(x: Tensor, stride: int, perm: Tensor, m: int, device: int, stream: int) -> Tensor:
    """x's columns in the order of the packed ones, [M, K']."""
    gathered = torch.empty(m, perm.numel(), dtype=x.dtype, device=x.device)
    args = GATHER.new(
        device, m, perm.numel(), stream, gathered.data_ptr(), x.data_ptr(), stride, perm.data_ptr()
    )
    check(ptx_entry("gm_gather_columns_sm80", GATHER)(args), "gather_columns")
    return gathered
