"""Launching linear over frag16 tiles on sm_75 and newer: argument checks and the call, shared by the schedules."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernels.common import DTYPE_CODES, dtype_name, need, need_workspace, row_stride
from gristmill.kernels.linear.frag16_sm75.weights import stored
from gristmill.kernels.linear.frag16_sm80.args import ARGS
from gristmill.kernels.linear.frag16_sm80.decode import COUNTER_BYTES
from gristmill.kernels.native import check

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearCall


def run(
    entry: Callable[[str], Callable[[ctypes.Structure], int]],
    config: Config,
    call: LinearCall,
    workspace_bytes: int,
    aligned: bool,
) -> None:
    """x [..., K] and the three tensors of a frag16 layout -> out [..., N or N / 2].

    Args:
        entry: the native entry for a format.
        workspace_bytes: of the counters and of the sums behind them.
        aligned: rows of x have to be 16-byte aligned.

    Raises:
        ValueError: tensors that do not fit the configuration, or a workspace that is too small.
        RuntimeError: no driver, one that does not take the PTX, or another error of the driver.
    """
    x, (tiles, second, perm) = call.x, call.weight
    form, what = stored(str(config["format"]), second), f"linear of {config['format']}"
    n, k = call.out.shape[-1] * (2 if call.silu_mul else 1), perm.numel() or x.shape[-1]
    expected = cdiv(n, 16) * cdiv(k, 128) * form.tile_bytes
    need(
        tiles.numel() == expected,
        f"{what}: expected {expected} bytes of tiles for a [{n}, {k}] weight, got {tiles.numel()}",
    )
    need(second.numel() in (0, n), f"{what}: expected {n} row multipliers, got {second.numel()}")
    m = x.numel() // x.shape[-1]
    if m == 0:
        return
    stride = row_stride(x)
    if perm.numel():  # the columns of x in the order of the packed ones, of which -1 have none
        x = x.reshape(m, -1).index_select(1, perm.clamp(min=0)).masked_fill_(perm < 0, 0)
        stride = k
    if aligned and (stride % 8 or x.data_ptr() % 16):
        copy = torch.empty(m, cdiv(k, 8) * 8, dtype=x.dtype, device=x.device)
        copy[:, :k] = x.reshape(m, k)
        x, stride = copy, copy.shape[1]
    # Gate and up are computed by different CTAs, so silu_mul follows in a launch of its own.
    target = torch.empty(m, n, dtype=x.dtype, device=x.device) if call.silu_mul else call.out
    args = ARGS.new(
        x.get_device(), y=target.data_ptr(), x=x.data_ptr(), ldx=stride, w=tiles.data_ptr(), m=m, n=n, k=k
    )
    args.stream = torch.cuda.current_stream(x.device).cuda_stream
    args.x_type = DTYPE_CODES[dtype_name(x.dtype)]
    if call.bias is not None:
        args.bias = call.bias.data_ptr()
    if call.residual is not None and not call.silu_mul:
        args.residual = call.residual.data_ptr()
    if second.numel():
        args.row_scale = second.data_ptr()
    elif second.dtype != torch.float32:
        args.scale_type = DTYPE_CODES[dtype_name(second.dtype)]
    for name in config.keys() - {"format", "tile_bytes"}:
        setattr(args, name, config[name])
    if workspace_bytes:
        workspace = call.workspace
        if workspace is None:
            workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=x.device)
            workspace[:COUNTER_BYTES].zero_()
        need_workspace("linear", workspace, workspace_bytes, x.device)
        args.counters, args.sums = workspace.data_ptr(), workspace.data_ptr() + COUNTER_BYTES
    check(entry(form.name)(args), what)
    if call.silu_mul:
        from gristmill.kernels.linear._epilogue import finish

        # the kernel has added the bias
        finish(target.view(*call.out.shape[:-1], n), None, call.residual, True, call.out)
