"""Shared by the launchers of linear over frag16 tiles: argument checks and the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernels.common import DTYPE_CODES, dtype_name, row_stride
from gristmill.kernels.linear.frag16_sm90.args import ARGS, GATHER
from gristmill.kernels.native import check, cuda_entry

if TYPE_CHECKING:
    from ctypes import Structure

    from gristmill.kernels.calls import LinearCall

DESCRIPTIVE = ("format", "tile_bytes")
"""Entries of a configuration that are not fields of `ARGS`."""


class Product(NamedTuple):
    """The checked operands of a launch; x has its columns in the order of the packed ones, and its rows `stride` apart. gated: the kernel
    writes silu(gate) * up; without, `target` has gate and up of a call that wants that."""

    m: int
    rows: int
    k: int
    x: Tensor
    stride: int
    target: Tensor
    row_scale: int | None
    x_type: int
    scale_type: int
    device: int
    stream: int
    gated: bool


def run(
    entry: Callable[[Structure], int],
    config: Config,
    product: Product,
    call: LinearCall,
    workspace: Tensor | None,
) -> None:
    """Calls an entry; where it does not compute silu_mul, that and the residual after it follow in a launch of their own."""
    gate_after = call.silu_mul and not product.gated
    args = ARGS.new(product.device)  # pointers that are not set are null
    args.stream = product.stream
    args.y = product.target.data_ptr()
    args.x = product.x.data_ptr()
    args.ldx = product.stride
    args.w = call.weight[0].data_ptr()
    if call.bias is not None:
        args.bias = call.bias.data_ptr()
    if call.residual is not None and not gate_after:
        args.residual = call.residual.data_ptr()
    args.row_scale = product.row_scale
    if workspace is not None:
        args.scratch = workspace.data_ptr()
    args.m = product.m
    args.n = product.rows
    args.k = product.k
    args.x_type = product.x_type
    args.scale_type = product.scale_type
    args.pdl = 1
    args.gated = int(product.gated)
    for name, value in config.items():
        if name not in DESCRIPTIVE:
            setattr(args, name, value)
    check(entry(args), f"linear of {config['format']}")
    if gate_after:
        from gristmill.kernels.linear._epilogue import finish

        # the kernel has added the bias
        rows = product.target.view(*call.out.shape[:-1], product.rows)
        finish(rows, None, call.residual, True, call.out)


def checked(config: Config, call: LinearCall, gates: Callable[[int], bool] | None = None) -> Product | None:
    """The operands of a call, or None without rows. ValueError for tensors that do not match the configuration.

    gates: whether the kernel computes silu_mul for a number of rows of W; None: it never does.
    """
    x, (tiles, second, perm) = call.x, call.weight
    form, rows = str(config["format"]), call.out.shape[-1] * (2 if call.silu_mul else 1)
    k = perm.numel() or x.shape[-1]
    m = x.numel() // x.shape[-1]
    expected = cdiv(rows, 16) * cdiv(k, 128) * int(config["tile_bytes"])
    if tiles.numel() != expected:
        raise ValueError(
            f"linear of {form}: expected {expected} bytes of tiles for a [{rows}, {k}] weight, got {tiles.numel()}"
        )
    row_scale = second.data_ptr() if second.numel() else None
    if row_scale is not None and second.numel() != rows:
        raise ValueError(f"linear of {form}: expected {rows} row multipliers, got {second.numel()}")
    if m == 0:
        return None
    device = x.get_device()
    stream = torch.cuda.current_stream(device).cuda_stream
    stride = row_stride(x)
    if perm.numel():
        x, stride = _gathered(x, stride, perm, m, device, stream), k
    gated = bool(call.silu_mul) and gates is not None and gates(rows)
    alone = call.silu_mul and not gated
    target = torch.empty(m, rows, dtype=x.dtype, device=x.device) if alone else call.out
    scale_type = (
        DTYPE_CODES[dtype_name(second.dtype)] if row_scale is None and second.dtype != torch.float32 else 0
    )
    x_type = DTYPE_CODES[dtype_name(x.dtype)]
    return Product(m, rows, k, x, stride, target, row_scale, x_type, scale_type, device, stream, gated)


def copyable(product: Product) -> Product:
    """The product with x copied if need be: TMA needs rows that are multiples of 16 bytes."""
    x, k = product.x, product.k
    if not (product.stride % 8 or product.stride < k or x.data_ptr() % 16):
        return product
    stride = cdiv(k, 8) * 8
    read = torch.empty(product.m, stride, dtype=x.dtype, device=x.device)
    read[:, :k] = x.reshape(product.m, k)
    return product._replace(x=read, stride=stride)


def _gathered(x: Tensor, stride: int, perm: Tensor, m: int, device: int, stream: int) -> Tensor:
    """x's columns in the order of the packed ones, [M, K']."""
    gathered = torch.empty(m, perm.numel(), dtype=x.dtype, device=x.device)
    args = GATHER.new(
        device, m, perm.numel(), stream, gathered.data_ptr(), x.data_ptr(), stride, perm.data_ptr()
    )
    check(cuda_entry("gm_gather_columns_sm90", GATHER)(args), "gather_columns")
    return gathered
