"""Launching the Hopper kernels of paged attention: for any batch (`_paged_attention_sm90.cu`), for few rows of each sequence
(`_paged_decode_sm90.cu`), and whichever is the right one for a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.attention.paged_attention.sm90.spec import (
    COUNTER_BYTES,
    DECODE_COUNTERS_AT,
    UNITS,
    parts_bytes,
    route,
)
from gristmill.kernels.attention.paged_attention.triton import launch_split as launch_triton
from gristmill.kernels.common import need_workspace
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import PagedAttentionCall

ENTRY = CallEntry("gm_paged_attention_sm90", "paged_attention")
DECODE = CallEntry("gm_paged_decode_sm90", "paged_attention")
PLACES = {"units": UNITS, "counters_at": 0, "parts_at": COUNTER_BYTES}
DECODE_PLACES = {"counters_at": DECODE_COUNTERS_AT, "parts_at": COUNTER_BYTES}


def launch(config: Config, call: PagedAttentionCall, decode: bool = False) -> None:
    """`decode` selects the kernel for few rows of each sequence.

    ValueError if the caches or out do not begin at multiples of 16 bytes or have strides that are none of 8 elements.
    """
    q, dim = call.q, call.q.shape[2]
    if q.shape[0] == 0:
        return
    call = with_workspace(with_positive_scale(call), parts_bytes(dim, int(config["ctas"])))
    device = q.get_device()
    if decode:
        warps = config.get("cta_warps", 0)  # times in a store may be of configurations without it
        DECODE.cuda({"ctas": config["ctas"], "cta_warps": warps, **DECODE_PLACES}, call, device)
    else:
        ENTRY.cuda({**config, **PLACES}, call, device)


def with_positive_scale(call: PagedAttentionCall) -> PagedAttentionCall:
    """The call with q in rows of whole 16-byte pieces and a scale above 0, and the same scores: the kernels look for the largest score,
    not for the smallest."""
    q, scale = call.q, call.scale
    if scale <= 0.0:
        q, scale = q * (-1.0 if scale < 0.0 else 0.0), -scale or 1.0
    if q.data_ptr() % 16 or q.stride(0) % 8 or q.stride(1) % 8:
        q = q.contiguous()
    return call if q is call.q else call.replace(q=q, scale=scale)


def with_workspace(call: PagedAttentionCall, size: int) -> PagedAttentionCall:
    """The call with room for the counters and `size` bytes of partial results. ValueError for a workspace that is too small."""
    if call.workspace is not None:
        need_workspace("paged_attention", call.workspace, COUNTER_BYTES + size, call.q.device)
        return call
    room = torch.empty(COUNTER_BYTES + size, dtype=torch.uint8, device=call.q.device)
    room[:COUNTER_BYTES].zero_()
    return call.replace(workspace=room)


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
