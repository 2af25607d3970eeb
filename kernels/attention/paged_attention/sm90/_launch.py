"""Launching the Hopper kernels of paged attention: the one for any batch (`_paged_attention_sm90.cu`), the one for few rows of each
sequence (`_paged_decode_sm90.cu`), and whichever is the right one for a batch."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p
from typing import TYPE_CHECKING

import torch

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

if TYPE_CHECKING:
    from gristmill.kernels.calls import PagedAttentionCall

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


def launch(config: Config, call: PagedAttentionCall, decode: bool = False) -> None:
    """decode: in the kernel for few rows of each sequence.

    ValueError if the caches or out do not begin at multiples of 16 bytes or have strides that are none of 8 elements.
    """
    tokens, heads, dim = call.q.shape
    if tokens == 0:
        return
    if dim > LARGEST_HEAD and not decode:
        launch_wide(config, call)
        return
    blocks, block_size, kv_heads, _ = call.k_cache.shape
    q, scale = positive_scale(call.q, call.scale)
    processors = int(config["ctas"])
    area = space(call.workspace, parts_bytes(dim, processors), q.device)
    device = q.get_device()
    steps = strides(q, call.out, call.k_cache, call.v_cache, call.block_table, call.k_scale, call.v_scale)
    tensors = (
        call.out.data_ptr(),
        address(call.lse),
        q.data_ptr(),
        call.k_cache.data_ptr(),
        call.v_cache.data_ptr(),
        call.block_table.data_ptr(),
        call.query_start.data_ptr(),
        call.seq_lens.data_ptr(),
        address(call.sinks),
        address(call.k_scale),
        address(call.v_scale),
    )
    token_scales = call.k_scale is not None and by_token(call.k_scale)
    shape = (tokens, call.seq_lens.shape[0], heads, kv_heads, dim)
    dtype, window = DTYPE_CODES[dtype_name(q.dtype)], max(0, call.window)
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
            call.max_q,
            call.max_ctx,
            window,
            scale,
            call.softcap,
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
            call.softcap,
            config["part_tiles"],
            config["reading"],
            processors,
            device,
            stream,
        )
    check(code, "paged_attention_sm90")


def launch_split(config: Config, call: PagedAttentionCall) -> None:
    """As `launch`; batches in which every sequence has few rows run in the kernel for those, or in the split Triton kernel.

    What is chosen follows from host-known bounds, so a captured graph replays what was captured.
    """
    page, kv_heads, dim = call.k_cache.shape[1:]
    heads, codes = call.q.shape[1], call.k_scale is not None
    kernel = route(call.max_q, heads, kv_heads, int(config["ctas"]), dim, codes, page)
    if kernel == "triton":
        room = call.workspace
        behind = None if room is None else room.view(torch.uint8)[COUNTER_BYTES:]
        launch_triton(config, call.replace(workspace=behind))
    else:
        launch(config, call, decode=kernel == "decode")
