"""Shared by the launchers of linear over frag16 tiles: the argument struct (`args.h`), argument checks and the call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_int, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernels.common import DTYPE_CODES, dtype_name, row_stride
from gristmill.kernels.native import check, cuda_function

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearCall

GATHER_ARGUMENTS = (c_void_p, c_void_p, c_int64, c_void_p, *(c_int,) * 3, c_void_p)


class Args(ctypes.Structure):
    """`gm_linear_frag16_args` of args.h, which documents the fields. The library rejects a struct of another size."""

    __slots__ = ()  # a name that is no field is an error
    _fields_ = (
        ("size", c_int32),
        ("device", c_int32),
        ("stream", c_void_p),
        ("y", c_void_p),
        ("x", c_void_p),
        ("ldx", c_int64),
        ("w", c_void_p),
        ("bias", c_void_p),
        ("residual", c_void_p),
        ("row_scale", c_void_p),
        ("scratch", c_void_p),
        ("m", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("x_type", c_int32),
        ("scale_type", c_int32),
        ("pdl", c_int32),
        ("split", c_int32),
        ("nt", c_int32),
        ("rt", c_int32),
        ("wn", c_int32),
        ("wk", c_int32),
        ("depth", c_int32),
        ("mt", c_int32),
        ("c", c_int32),
        ("slices", c_int32),
        ("ctas", c_int32),
        ("grid", c_int32),
        ("raster", c_int32),
        ("even", c_int32),
        ("lag", c_int32),
    )


SIZE = ctypes.sizeof(Args)

ARGUMENTS = (POINTER(Args),)
"""Argument types of every entry: Args -> 0 or an error code; with device -1, the bytes of shared memory."""
DESCRIPTIVE = ("format", "tile_bytes")
"""Entries of a configuration that are not fields of `Args`."""


class Product(NamedTuple):
    """The checked operands of a launch. x: its columns in the order of the packed ones, its rows `stride` apart."""

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


def run(
    entry: Callable[..., int], config: Config, product: Product, call: LinearCall, scratch: Tensor | None
) -> None:
    """Calls an entry; silu_mul and the residual after it follow in torch."""
    args = Args(SIZE, product.device)  # pointers that are not set are null
    args.stream = product.stream
    args.y = product.target.data_ptr()
    args.x = product.x.data_ptr()
    args.ldx = product.stride
    args.w = call.weight[0].data_ptr()
    if call.bias is not None:
        args.bias = call.bias.data_ptr()
    if call.residual is not None and not call.silu_mul:
        args.residual = call.residual.data_ptr()
    args.row_scale = product.row_scale
    if scratch is not None:
        args.scratch = scratch.data_ptr()
    args.m = product.m
    args.n = product.rows
    args.k = product.k
    args.x_type = product.x_type
    args.scale_type = product.scale_type
    args.pdl = 1
    for name, value in config.items():
        if name not in DESCRIPTIVE:
            setattr(args, name, value)
    check(entry(args), f"linear of {config['format']}")
    if call.silu_mul:
        from gristmill.kernels.linear._epilogue import finish

        # the kernel has added the bias
        rows = product.target.view(*call.out.shape[:-1], product.rows)
        finish(rows, None, call.residual, True, call.out)


def checked(config: Config, call: LinearCall) -> Product | None:
    """The operands of a call, or None without rows. ValueError for tensors that do not match the configuration."""
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
    # Gate and up are computed by different CTAs, so silu_mul follows in torch.
    target = torch.empty(m, rows, dtype=x.dtype, device=x.device) if call.silu_mul else call.out
    scale_type = (
        DTYPE_CODES[dtype_name(second.dtype)] if row_scale is None and second.dtype != torch.float32 else 0
    )
    return Product(
        m, rows, k, x, stride, target, row_scale, DTYPE_CODES[dtype_name(x.dtype)], scale_type, device, stream
    )


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
    gather = cuda_function("gm_gather_columns_sm90", "sm_90a", GATHER_ARGUMENTS)
    code = gather(gathered.data_ptr(), x.data_ptr(), stride, perm.data_ptr(), m, perm.numel(), device, stream)
    check(code, "gather_columns")
    return gathered
