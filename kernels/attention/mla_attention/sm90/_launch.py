"""Launching the Hopper kernel of latent attention (`_mla_attention_sm90.cu`)."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p
from typing import TYPE_CHECKING

import torch

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.attention.mla_attention.sm90.spec import COUNTER_BYTES, PART_BYTES
from gristmill.kernels.common import DTYPE_CODES, dtype_name, need_workspace
from gristmill.kernels.native import check, cuda_function

if TYPE_CHECKING:
    from gristmill.kernels.calls import MlaAttentionCall

ARGUMENTS = (*(c_void_p,) * 8, c_int64 * 6, *(c_int,) * 8, c_float, *(c_int,) * 4, c_void_p)


def launch(config: Config, call: MlaAttentionCall) -> None:
    """The arguments of `mla_attention.reference`, then out [tokens, heads, latent_dim].

    The heads of q are one after the other in memory, or q is copied. ValueError if the cache or out do not begin at
    multiples of 16 bytes or have strides that are no multiples of 8 elements.
    """
    q, scale, workspace = call.q, call.scale, call.workspace
    tokens, heads, _ = q.shape
    if tokens == 0:
        return
    blocks, block_size, _ = call.cache.shape
    if scale <= 0.0:  # the kernel looks for the largest score, not for the smallest
        q, scale = q * (-1.0 if scale < 0.0 else 0.0), -scale or 1.0
    if q.data_ptr() % 16 or q.stride(1) % 8 or (tokens > 1 and q.stride(0) != heads * q.stride(1)):
        q = q.contiguous()
    ctas = int(config["ctas"])
    size = COUNTER_BYTES + (0 if int(config["slack"]) < 0 else 2 * ctas * PART_BYTES)
    if workspace is None:
        workspace = torch.zeros(size, dtype=torch.uint8, device=q.device)
    else:
        need_workspace("mla_attention", workspace, size, q.device)
    device = q.get_device()
    strides = (c_int64 * 6)(
        q.stride(1), *call.out.stride()[:2], *call.cache.stride()[:2], call.block_table.stride(0)
    )
    code = cuda_function("gm_mla_attention_sm90", "sm_90a", ARGUMENTS)(
        call.out.data_ptr(),
        None if call.lse is None else call.lse.data_ptr(),
        q.data_ptr(),
        call.cache.data_ptr(),
        call.block_table.data_ptr(),
        call.query_start.data_ptr(),
        call.seq_lens.data_ptr(),
        workspace.data_ptr(),
        strides,
        tokens,
        call.seq_lens.shape[0],
        heads,
        blocks,
        block_size,
        DTYPE_CODES[dtype_name(q.dtype)],
        call.max_q,
        call.max_ctx,
        scale,
        ctas,
        config["least"],
        config["slack"],
        device,
        torch.cuda.current_stream(device).cuda_stream,
    )
    check(code, "mla_attention_sm90")
