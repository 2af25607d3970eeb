"""Launching the decode kernels over frag16 tiles: what both specs, of 4-bit and of 8-bit weights, call."""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.common import dtype_name, row_stride
from gristmill.kernels.linear.frag16_shapes import ROWS, ceil
from gristmill.kernels.native import check, cuda_function

ARGUMENTS = (c_void_p, c_void_p, c_int64, *(c_void_p,) * 3, *(c_int,) * 13, c_void_p, c_void_p)
"""Of ``gm_linear_<format>_sm90``."""
GATHER_ARGUMENTS = (c_void_p, c_void_p, c_int64, c_void_p, *(c_int,) * 3, c_void_p)
TYPES = {"fp16": 1, "bf16": 2}


def launch(
    config: Config, x: Tensor, weight: list[Tensor], bias: Any, residual: Any, silu_mul: bool, n: int, workspace: Any, out: Tensor
) -> None:
    """x [..., K] and the three tensors of a frag16 layout -> out [..., N or N / 2]; 16 rows of x a launch."""
    tiles, second, perm = weight
    form, rows = str(config["format"]), out.shape[-1] * (2 if silu_mul else 1)
    k = perm.numel() or x.shape[-1]
    m = x.numel() // x.shape[-1]
    wanted = ceil(rows, 16) * ceil(k, 128) * int(config["tile_bytes"])
    if tiles.numel() != wanted:
        raise ValueError(f"linear of {form}: expected {wanted} bytes of tiles for a [{rows}, {k}] weight, got {tiles.numel()}")
    row_scale = second.data_ptr() if second.numel() else None
    if row_scale is not None and second.numel() != rows:
        raise ValueError(f"linear of {form}: expected {rows} row multipliers, got {second.numel()}")
    if m == 0:
        return
    device, item = x.get_device(), x.element_size()
    stream = torch.cuda.current_stream(device).cuda_stream
    stride = row_stride(x)
    if perm.numel():
        x = _gathered(x, stride, perm, m, k, device, stream)
        stride = k
    # The gate and its partner are rows of different CTAs, so silu_mul follows in torch.
    target = torch.empty(m, rows, dtype=x.dtype, device=x.device) if silu_mul else out
    entry = cuda_function(f"gm_linear_{form}_sm90", "sm_90a", ARGUMENTS)
    scale_type = TYPES[dtype_name(second.dtype)] if row_scale is None and second.dtype != torch.float32 else 0
    for start in range(0, m, ROWS):
        at = start * rows * item
        code = entry(
            target.data_ptr() + at, x.data_ptr() + start * stride * item, stride, tiles.data_ptr(),
            None if bias is None else bias.data_ptr(), None if residual is None or silu_mul else residual.data_ptr() + at,
            min(ROWS, m - start), rows, k, TYPES[dtype_name(x.dtype)], scale_type, config["nt"], config["rt"], config["wn"],
            config["wk"], config["split"], config["depth"], 1, device, stream, row_scale,
        )  # fmt: skip
        check(code, f"linear of {form}")
    if silu_mul:
        from gristmill.kernels.linear._epilogue import finish

        # bias is in the sums already
        finish(target.view(*out.shape[:-1], rows), None, residual, True, out)


def _gathered(x: Tensor, stride: int, perm: Tensor, m: int, k: int, device: int, stream: int) -> Tensor:
    """x's columns in the order of the packed ones, [M, K']."""
    made = torch.empty(m, k, dtype=x.dtype, device=x.device)
    entry = cuda_function("gm_gather_columns_sm90", "sm_90a", GATHER_ARGUMENTS)
    code = entry(made.data_ptr(), x.data_ptr(), stride, perm.data_ptr(), m, k, device, stream)
    check(code, "gather_columns")
    return made
