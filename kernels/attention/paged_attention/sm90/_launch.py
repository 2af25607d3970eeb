"""Launching the Hopper kernels of paged attention: the one for any batch (`_paged_attention_sm90.cu`), the one for few rows of each
sequence (`_paged_decode_sm90.cu`), and whichever is the right one for a batch."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.attention.paged_attention.sm90._launch_wide import launch as launch_wide
from gristmill.kernels.attention.paged_attention.sm90._operands import address, positive_scale, space, strides
from gristmill.kernels.attention.paged_attention.sm90.spec import (
    COUNTER_BYTES,
    DECODE_COUNTERS_AT,
    LARGEST_HEAD,
    UNITS,
    parts_bytes,
    route,
)
from gristmill.kernels.attention.paged_attention.triton import launch_split as launch_triton
from gristmill.kernels.common import DTYPE_CODES, dtype_name
from gristmill.kernels.kv_cache.quantized import by_token
from gristmill.kernels.native import check, cuda_function

ARGUMENTS = (*(c_void_p,) * 13, c_int64 * 17, *(c_int,) * 11, c_float, c_float, *(c_int,) * 4, c_void_p)
DECODE_ARGUMENTS = (
    *(c_void_p,) * 13,
    c_int64 * 17,
    *(c_int,) * 11,
    c_float,
    c_float,
    *(c_int,) * 2,
    c_void_p,
)


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
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    softcap: float,
    out: Tensor,
    decode: bool = False,
) -> None:
    """The arguments of `paged_attention.reference`, then out [tokens, heads, D]. decode: in the kernel for few rows.

    ValueError if the caches or out do not begin at multiples of 16 bytes or have strides that are none of 8 elements.
    """
    tokens, heads, dim = q.shape
    if tokens == 0:
        return
    if dim > LARGEST_HEAD and not decode:
        bounds = (query_start, seq_lens, max_q, max_ctx, scale, window, sinks, lse)
        launch_wide(config, q, k_cache, v_cache, block_table, *bounds, workspace, softcap, out)
        return
    blocks, block_size, kv_heads, _ = k_cache.shape
    q, scale = positive_scale(q, scale)
    processors = int(config["ctas"])
    area = space(workspace, parts_bytes(dim, processors), q.device)
    device = q.get_device()
    steps = strides(q, out, k_cache, v_cache, block_table, k_scale, v_scale)
    tensors = (
        out.data_ptr(),
        address(lse),
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        block_table.data_ptr(),
        query_start.data_ptr(),
        seq_lens.data_ptr(),
        address(sinks),
        address(k_scale),
        address(v_scale),
    )
    token_scales = k_scale is not None and by_token(k_scale)
    shape = (tokens, seq_lens.shape[0], heads, kv_heads, dim)
    dtype, window = DTYPE_CODES[dtype_name(q.dtype)], max(0, window)
    stream = torch.cuda.current_stream(device).cuda_stream
    if decode:
        code = cuda_function("gm_paged_decode_sm90", "sm_90a", DECODE_ARGUMENTS)(
            *tensors,
            area.counters + DECODE_COUNTERS_AT,
            area.parts,
            steps,
            *shape,
            block_size,
            dtype,
            token_scales,
            max_q,
            max_ctx,
            window,
            scale,
            softcap,
            processors,
            device,
            stream,
        )
    else:
        code = cuda_function("gm_paged_attention_sm90", "sm_90a", ARGUMENTS)(
            *tensors,
            area.counters,
            area.parts,
            steps,
            UNITS,
            *shape,
            blocks,
            block_size,
            dtype,
            token_scales,
            window,
            scale,
            softcap,
            config["part_tiles"],
            config["reading"],
            processors,
            device,
            stream,
        )
    check(code, "paged_attention_sm90")


def launch_split(
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
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    softcap: float,
    out: Tensor,
) -> None:
    """As `launch`; batches in which every sequence has few rows run in the kernel for those, or in the split Triton kernel.

    What is chosen follows from host-known bounds, so a captured graph replays what was captured.
    """
    arguments = (
        q,
        k_cache,
        v_cache,
        block_table,
        query_start,
        seq_lens,
        max_q,
        max_ctx,
        scale,
        window,
        sinks,
        lse,
    )
    page, kv_heads, dim = k_cache.shape[1:]
    kernel = route(
        max_q,
        q.shape[1],
        kv_heads,
        int(config["ctas"]),
        dim,
        k_scale is not None,
        page,
    )
    if kernel == "triton":
        behind = None if workspace is None else workspace.view(torch.uint8)[COUNTER_BYTES:]
        launch_triton(config, *arguments, behind, k_scale, v_scale, softcap, out)
    else:
        launch(config, *arguments, workspace, k_scale, v_scale, softcap, out, decode=kernel == "decode")
