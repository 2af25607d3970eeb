"""Launching dense products of a few dozen rows on Hopper: checks of the arguments, the call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.common import DTYPE_CODES, dtype_name, row_stride
from gristmill.kernels.linear.dense_mid_sm90.args import ARGS
from gristmill.kernels.native import check, cuda_entry

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearCall


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K] fp16 or bf16, one dense tensor [N, K] of the same dtype -> out [..., N or N / 2]; at most 128 rows of x."""
    x = call.x
    dense, k = call.weight[0], x.shape[-1]
    if dense.data_ptr() % 16 or not dense.is_contiguous():
        raise ValueError("linear_dense_mid_sm90: the weight must be contiguous and 16-byte aligned")
    m = x.numel() // k
    if m == 0:
        return
    stride = row_stride(x)
    if stride % 8 or stride < k or x.data_ptr() % 16:
        x, stride = x.reshape(m, k).clone(memory_format=torch.contiguous_format), k
    device = x.get_device()
    args = ARGS.new(
        device,
        stream=torch.cuda.current_stream(device).cuda_stream,
        w=dense.data_ptr(),
        x=x.data_ptr(),
        ldx=stride,
        bias=0 if call.bias is None else call.bias.data_ptr(),
        residual=0 if call.residual is None else call.residual.data_ptr(),
        y=call.out.data_ptr(),
        m=m,
        n=dense.shape[0],
        k=k,
        type=DTYPE_CODES[dtype_name(x.dtype)],
        silu_mul=call.silu_mul,
        pdl=1,
        rows=int(config["rows"]),
        split=int(config["split"]),
        ctas=int(config["ctas"]),
    )
    check(cuda_entry("gm_dense_mid_sm90", ARGS)(args), "linear_dense_mid_sm90")
