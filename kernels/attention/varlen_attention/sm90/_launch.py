"""Launching the Hopper kernel of attention over dense sequences (`_varlen_attention_sm90.cu`)."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.common import DTYPE_CODES, dtype_name
from gristmill.kernels.native import check, cuda_function

if TYPE_CHECKING:
    from gristmill.kernels.calls import VarlenAttentionCall

ARGUMENTS = (*(c_void_p,) * 7, c_int64 * 8, *(c_int,) * 8, c_float, *(c_int,) * 2, c_void_p)


def launch(config: Config, call: VarlenAttentionCall) -> None:
    """The arguments of `varlen_attention.reference`, then out [tokens, heads, Dv].

    q, k and v are copied where rows do not begin at multiples of 16 bytes, or overlap. ValueError if those of out do not.
    """
    q, k, v, scale = call.q, call.k, call.v, call.scale
    tokens, heads, qk_dim = q.shape
    if tokens == 0:
        return
    rows, kv_heads, v_dim = v.shape
    if scale <= 0.0:  # the kernel looks for the largest score, not for the smallest
        q, scale = q * (-1.0 if scale < 0.0 else 0.0), -scale or 1.0
    q, k, v = _whole_pieces(q), _whole_pieces(k), _whole_pieces(v)
    device = q.get_device()
    strides = (c_int64 * 8)(*q.stride()[:2], *call.out.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    code = cuda_function("gm_varlen_attention_sm90", "sm_90a", ARGUMENTS)(
        call.out.data_ptr(),
        None if call.lse is None else call.lse.data_ptr(),
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        call.query_start.data_ptr(),
        call.context_start.data_ptr(),
        strides,
        tokens,
        rows,
        call.query_start.shape[0] - 1,
        heads,
        kv_heads,
        qk_dim,
        v_dim,
        DTYPE_CODES[dtype_name(q.dtype)],
        scale,
        config["ctas"],
        device,
        torch.cuda.current_stream(device).cuda_stream,
    )
    check(code, "varlen_attention_sm90")


def _whole_pieces(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it that TMA takes: rows of 16-byte pieces, one after the other."""
    token, head, _ = tensor.stride()
    if tensor.data_ptr() % 16 or token % 8 or head % 8 or 0 in (token, head):
        return tensor.contiguous()
    return tensor
