"""Launching the Hopper kernel of paged attention with heads of more than 128 elements (`_paged_wide_sm90.cu`)."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p
from typing import TYPE_CHECKING

import torch

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.attention.paged_attention.sm90._operands import address, positive_scale, space, strides
from gristmill.kernels.attention.paged_attention.sm90.spec import UNITS, parts_bytes
from gristmill.kernels.common import DTYPE_CODES, dtype_name
from gristmill.kernels.native import check, cuda_function

if TYPE_CHECKING:
    from gristmill.kernels.calls import PagedAttentionCall

ARGUMENTS = (*(c_void_p,) * 11, c_int64 * 17, *(c_int,) * 10, c_float, c_float, *(c_int,) * 4, c_void_p)


def launch(config: Config, call: PagedAttentionCall) -> None:
    """For caches of q's dtype.

    ValueError if the caches or out do not begin at multiples of 16 bytes or have strides that are none of 8 elements.
    """
    tokens, heads, dim = call.q.shape
    if tokens == 0:
        return
    blocks, block_size, kv_heads, _ = call.k_cache.shape
    q, scale = positive_scale(call.q, call.scale)
    processors = int(config["ctas"])
    area = space(call.workspace, parts_bytes(dim, processors), q.device)
    device = q.get_device()
    code = cuda_function("gm_paged_wide_sm90", "sm_90a", ARGUMENTS)(
        call.out.data_ptr(),
        address(call.lse),
        q.data_ptr(),
        call.k_cache.data_ptr(),
        call.v_cache.data_ptr(),
        call.block_table.data_ptr(),
        call.query_start.data_ptr(),
        call.seq_lens.data_ptr(),
        address(call.sinks),
        area.counters,
        area.parts,
        strides(q, call.out, call.k_cache, call.v_cache, call.block_table),
        UNITS,
        tokens,
        call.seq_lens.shape[0],
        heads,
        kv_heads,
        dim,
        blocks,
        block_size,
        DTYPE_CODES[dtype_name(q.dtype)],
        max(0, call.window),
        scale,
        call.softcap,
        2 * config["part_tiles"],
        config["reading"],
        processors,
        device,
        torch.cuda.current_stream(device).cuda_stream,
    )
    check(code, "paged_attention_sm90")
