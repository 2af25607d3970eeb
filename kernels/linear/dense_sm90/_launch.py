"""Launching skinny dense products on Hopper: checks of the arguments, the call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.common import DTYPE_CODES, dtype_name, row_stride
from gristmill.kernels.linear.dense_sm90.args import ARGS
from gristmill.kernels.native import check, cuda_entry

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearCall


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K] fp16 or bf16, one dense tensor [N, K] of the same dtype -> out [..., N or N / 2]; at most 16 rows of x."""
    x = call.x
    dense, k = call.weight[0], x.shape[-1]
    if dense.data_ptr() % 16 or not dense.is_contiguous():
        raise ValueError("linear_dense_decode_sm90: the weight must be contiguous and 16-byte aligned")
    m = x.numel() // k
    if m == 0:
        return
    stride = row_stride(x)
    if stride % 8 or x.data_ptr() % 16:
        x, stride = x.reshape(m, k).clone(memory_format=torch.contiguous_format), k
    device = x.get_device()
    args = ARGS.new(device)  # pointers that are not set are null
    args.stream = torch.cuda.current_stream(device).cuda_stream
    args.y, args.x, args.ldx, args.w = call.out.data_ptr(), x.data_ptr(), stride, dense.data_ptr()
    if call.bias is not None:
        args.bias = call.bias.data_ptr()
    if call.residual is not None:
        args.residual = call.residual.data_ptr()
    args.m, args.n, args.k = m, dense.shape[0], k
    args.type, args.silu_mul, args.pdl = DTYPE_CODES[dtype_name(x.dtype)], call.silu_mul, 1
    args.rt, args.wk, args.split = int(config["rt"]), int(config["wk"]), int(config["split"])
    check(cuda_entry("gm_dense_decode_sm90", ARGS)(args), "linear_dense_decode_sm90")
