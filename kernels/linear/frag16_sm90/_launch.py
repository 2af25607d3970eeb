"""Shared by the launchers of linear over frag16 tiles: the argument struct (`args.h`), argument checks and the call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_int, c_int32, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernels.common import DTYPE_CODES, dtype_name, row_stride
from gristmill.kernels.native import check, cuda_function

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


class Call(NamedTuple):
    """The checked arguments of a launch. x: its columns in the order of the packed ones, its rows `stride` apart."""

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
    entry: Callable[..., int],
    config: Config,
    call: Call,
    weight: list[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    silu_mul: bool,
    scratch: Tensor | None,
    out: Tensor,
) -> None:
    """Calls an entry; silu_mul and the residual after it follow in torch."""
    args = Args(SIZE, call.device)  # pointers that are not set are null
    args.stream = call.stream
    args.y = call.target.data_ptr()
    args.x = call.x.data_ptr()
    args.ldx = call.stride
    args.w = weight[0].data_ptr()
    if bias is not None:
        args.bias = bias.data_ptr()
    if residual is not None and not silu_mul:
        args.residual = residual.data_ptr()
    args.row_scale = call.row_scale
    if scratch is not None:
        args.scratch = scratch.data_ptr()
    args.m = call.m
    args.n = call.rows
    args.k = call.k
    args.x_type = call.x_type
    args.scale_type = call.scale_type
    args.pdl = 1
    for name, value in config.items():
        if name not in DESCRIPTIVE:
            setattr(args, name, value)
    check(entry(args), f"linear of {config['format']}")
    if silu_mul:
        from gristmill.kernels.linear._epilogue import finish

        # the kernel has added the bias
        finish(call.target.view(*out.shape[:-1], call.rows), None, residual, True, out)


def checked(config: Config, x: Tensor, weight: list[Tensor], silu_mul: bool, out: Tensor) -> Call | None:
    """The call, or None without rows. ValueError for tensors that do not match the configuration."""
    tiles, second, perm = weight
    form, rows = str(config["format"]), out.shape[-1] * (2 if silu_mul else 1)
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
    target = torch.empty(m, rows, dtype=x.dtype, device=x.device) if silu_mul else out
    scale_type = (
        DTYPE_CODES[dtype_name(second.dtype)] if row_scale is None and second.dtype != torch.float32 else 0
    )
    return Call(
        m, rows, k, x, stride, target, row_scale, DTYPE_CODES[dtype_name(x.dtype)], scale_type, device, stream
    )


def copyable(call: Call) -> Call:
    """The call with x copied if need be: TMA needs rows that are multiples of 16 bytes."""
    if not (call.stride % 8 or call.stride < call.k or call.x.data_ptr() % 16):
        return call
    stride = cdiv(call.k, 8) * 8
    read = torch.empty(call.m, stride, dtype=call.x.dtype, device=call.x.device)
    read[:, : call.k] = call.x.reshape(call.m, call.k)
    return call._replace(x=read, stride=stride)


def _gathered(x: Tensor, stride: int, perm: Tensor, m: int, device: int, stream: int) -> Tensor:
    """x's columns in the order of the packed ones, [M, K']."""
    gathered = torch.empty(m, perm.numel(), dtype=x.dtype, device=x.device)
    gather = cuda_function("gm_gather_columns_sm90", "sm_90a", GATHER_ARGUMENTS)
    code = gather(gathered.data_ptr(), x.data_ptr(), stride, perm.data_ptr(), m, perm.numel(), device, stream)
    check(code, "gather_columns")
    return gathered
