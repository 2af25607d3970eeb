"""Launching the Hopper kernel of paged attention with heads of more than 128 elements (`_paged_wide_sm90.cu`)."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.attention.paged_attention.sm90._operands import address, positive_scale, space, strides
from gristmill.kernels.attention.paged_attention.sm90.spec import UNITS, parts_bytes
from gristmill.kernels.common import DTYPE_CODES, dtype_name
from gristmill.kernels.native import check, cuda_function

ARGUMENTS = (*(c_void_p,) * 11, c_int64 * 17, *(c_int,) * 10, c_float, c_float, *(c_int,) * 4, c_void_p)


def launch(
    config: Config,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    max_q: int,
    max_ctx: int,
    scale: float,
    window: int,
    sinks: Tensor | None,
    lse: Tensor | None,
    workspace: Tensor | None,
    softcap: float,
    out: Tensor,
) -> None:
    """The arguments of `paged_attention.reference` for caches of q's dtype, then out [tokens, heads, D].

    ValueError if the caches or out do not begin at multiples of 16 bytes or have strides that are none of 8 elements.
    """
    tokens, heads, dim = q.shape
    if tokens == 0:
        return
    blocks, block_size, kv_heads, _ = k_cache.shape
    q, scale = positive_scale(q, scale)
    processors = int(config["ctas"])
    area = space(workspace, parts_bytes(dim, processors), q.device)
    device = q.get_device()
    code = cuda_function("gm_paged_wide_sm90", "sm_90a", ARGUMENTS)(
        out.data_ptr(),
        address(lse),
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        block_table.data_ptr(),
        query_start.data_ptr(),
        seq_lens.data_ptr(),
        address(sinks),
        area.counters,
        area.parts,
        strides(q, out, k_cache, v_cache, block_table),
        UNITS,
        tokens,
        seq_lens.shape[0],
        heads,
        kv_heads,
        dim,
        blocks,
        block_size,
        DTYPE_CODES[dtype_name(q.dtype)],
        max(0, window),
        scale,
        softcap,
        2 * config["part_tiles"],
        config["reading"],
        processors,
        device,
        torch.cuda.current_stream(device).cuda_stream,
    )
    check(code, "paged_attention_sm90")
