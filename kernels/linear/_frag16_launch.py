"""Launching the Hopper kernels over frag16 tiles: `launch` and `launch_fed` for few rows of x, `launch_tma` for many."""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.common import dtype_name, need_workspace, row_stride
from gristmill.kernels.linear.frag16_shapes import ceil
from gristmill.kernels.linear.frag16_tma_shapes import FLAG_BYTES, scratch_bytes
from gristmill.kernels.native import check, cuda_function

ARGUMENTS = (c_void_p, c_void_p, c_int64, *(c_void_p,) * 3, *(c_int,) * 12, c_void_p, c_void_p)
"""Of ``gm_linear_<format>_sm90``."""
FED_ARGUMENTS = (c_void_p, c_void_p, c_int64, *(c_void_p,) * 3, *(c_int,) * 13, c_void_p, c_void_p)
"""Of ``gm_linear_<format>_fed_sm90``."""
TMA_ARGUMENTS = (c_void_p, c_void_p, c_int64, *(c_void_p,) * 5, *(c_int,) * 16, c_void_p)
"""Of ``gm_linear_<format>_tma_sm90``."""
GATHER_ARGUMENTS = (c_void_p, c_void_p, c_int64, c_void_p, *(c_int,) * 3, c_void_p)
TYPES = {"fp16": 1, "bf16": 2}


class Call(NamedTuple):
    """What a launch needs of its arguments, checked. x: its columns in the order of the packed ones, its rows `stride` apart."""

    m: int
    rows: int
    k: int
    x: Tensor
    stride: int
    target: Tensor
    row_scale: int | None
    dtype: int
    scale_dtype: int
    device: int
    stream: int


def launch(
    config: Config,
    x: Tensor,
    weight: list[Tensor],
    bias: Any,
    residual: Any,
    silu_mul: bool,
    n: int,
    workspace: Any,
    out: Tensor,
) -> None:
    """x [..., K] and the three tensors of a frag16 layout -> out [..., N or N / 2]; at most 16 rows of x."""
    call = _checked(config, x, weight, silu_mul, out)
    if call is not None:
        entry = cuda_function(f"gm_linear_{config['format']}_sm90", "sm_90a", ARGUMENTS)
        _decode(
            entry,
            ("nt", "rt", "wk"),
            call,
            call.x,
            call.stride,
            config,
            weight,
            bias,
            residual,
            silu_mul,
            out,
        )


def launch_fed(
    config: Config,
    x: Tensor,
    weight: list[Tensor],
    bias: Any,
    residual: Any,
    silu_mul: bool,
    n: int,
    workspace: Any,
    out: Tensor,
) -> None:
    """x [..., K] and the three tensors of a frag16 layout -> out [..., N or N / 2]; at most 16 rows of x."""
    call = _checked(config, x, weight, silu_mul, out)
    if call is not None:
        entry = cuda_function(f"gm_linear_{config['format']}_fed_sm90", "sm_90a", FED_ARGUMENTS)
        _decode(
            entry,
            ("nt", "rt", "wn", "wk"),
            call,
            *_for_tensor_copies(call),
            config,
            weight,
            bias,
            residual,
            silu_mul,
            out,
        )


def _decode(
    entry: Any,
    shape: tuple[str, ...],
    call: Call,
    read: Tensor,
    stride: int,
    config: Config,
    weight: list[Tensor],
    bias: Any,
    residual: Any,
    silu_mul: bool,
    out: Tensor,
) -> None:
    """The call of either decode kernel. shape: what names an instance of it; read, stride: x as it takes it."""
    code = entry(
        call.target.data_ptr(),
        read.data_ptr(),
        stride,
        weight[0].data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if residual is None or silu_mul else residual.data_ptr(),
        call.m,
        call.rows,
        call.k,
        call.dtype,
        call.scale_dtype,
        *(config[name] for name in shape),
        config["split"],
        config["depth"],
        1,
        call.device,
        call.stream,
        call.row_scale,
    )
    check(code, f"linear of {config['format']}")
    _finish(call, residual, silu_mul, out)


def launch_tma(
    config: Config,
    x: Tensor,
    weight: list[Tensor],
    bias: Any,
    residual: Any,
    silu_mul: bool,
    n: int,
    workspace: Any,
    out: Tensor,
) -> None:
    """x [..., K] and the three tensors of a frag16 layout -> out [..., N or N / 2]; any number of rows in one launch."""
    call = _checked(config, x, weight, silu_mul, out)
    if call is None:
        return
    read, stride = _for_tensor_copies(call)
    space = _scratch(workspace, scratch_bytes(config), x.device) if config["even"] else None
    code = cuda_function(f"gm_linear_{config['format']}_tma_sm90", "sm_90a", TMA_ARGUMENTS)(
        call.target.data_ptr(),
        read.data_ptr(),
        stride,
        weight[0].data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if residual is None or silu_mul else residual.data_ptr(),
        call.row_scale,
        None if space is None else space.data_ptr(),
        call.m,
        call.rows,
        call.k,
        call.dtype,
        call.scale_dtype,
        *(config[name] for name in ("mt", "c", "slices", "ctas", "split", "grid", "raster", "even", "lag")),
        1,
        call.device,
        call.stream,
    )
    check(code, f"linear of {config['format']}")
    _finish(call, residual, silu_mul, out)


def _checked(config: Config, x: Tensor, weight: list[Tensor], silu_mul: bool, out: Tensor) -> Call | None:
    """The call, or None where there are no rows. ValueError for tensors that are not such a weight."""
    tiles, second, perm = weight
    form, rows = str(config["format"]), out.shape[-1] * (2 if silu_mul else 1)
    k = perm.numel() or x.shape[-1]
    m = x.numel() // x.shape[-1]
    wanted = ceil(rows, 16) * ceil(k, 128) * int(config["tile_bytes"])
    if tiles.numel() != wanted:
        raise ValueError(
            f"linear of {form}: expected {wanted} bytes of tiles for a [{rows}, {k}] weight, got {tiles.numel()}"
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
    # The gate and its partner are rows of different CTAs, so silu_mul follows in torch.
    target = torch.empty(m, rows, dtype=x.dtype, device=x.device) if silu_mul else out
    scale_dtype = (
        TYPES[dtype_name(second.dtype)] if row_scale is None and second.dtype != torch.float32 else 0
    )
    return Call(
        m, rows, k, x, stride, target, row_scale, TYPES[dtype_name(x.dtype)], scale_dtype, device, stream
    )


def _for_tensor_copies(call: Call) -> tuple[Tensor, int]:
    """x and the stride of its rows, copied if need be: the tensor copy engine wants rows of 16 bytes."""
    if not (call.stride % 8 or call.stride < call.k or call.x.data_ptr() % 16):
        return call.x, call.stride
    stride = ceil(call.k, 8) * 8
    read = torch.empty(call.m, stride, dtype=call.x.dtype, device=call.x.device)
    read[:, : call.k] = call.x.reshape(call.m, call.k)
    return read, stride


def _finish(call: Call, residual: Any, silu_mul: bool, out: Tensor) -> None:
    if silu_mul:
        from gristmill.kernels.linear._epilogue import finish

        # bias is in the sums already
        finish(call.target.view(*out.shape[:-1], call.rows), None, residual, True, out)


def _gathered(x: Tensor, stride: int, perm: Tensor, m: int, device: int, stream: int) -> Tensor:
    """x's columns in the order of the packed ones, [M, K']."""
    made = torch.empty(m, perm.numel(), dtype=x.dtype, device=x.device)
    entry = cuda_function("gm_gather_columns_sm90", "sm_90a", GATHER_ARGUMENTS)
    code = entry(made.data_ptr(), x.data_ptr(), stride, perm.data_ptr(), m, perm.numel(), device, stream)
    check(code, "gather_columns")
    return made


def _scratch(given: Any, size: int, device: Any) -> Tensor:
    """The caller's workspace, or fresh memory. ValueError for one that is too small or elsewhere."""
    if given is None:
        fresh = torch.empty(size, dtype=torch.uint8, device=device)
        fresh[:FLAG_BYTES].zero_()
        return fresh
    need_workspace("linear", given, size, device)
    return given  # type: ignore[no-any-return]
