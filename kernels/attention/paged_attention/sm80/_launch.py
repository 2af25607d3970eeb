"""Launching paged attention on sm_80 and newer: decodes alone, any batch, or the split Triton kernel, whichever is the right one for a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.attention.paged_attention.sm80.spec import decode_bytes, parts_at, route, source
from gristmill.kernels.attention.paged_attention.sm90._launch import with_positive_scale
from gristmill.kernels.attention.paged_attention.triton import launch_split as launch_triton
from gristmill.kernels.common import need_workspace
from gristmill.kernels.cuda_ptx_call import PtxCallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import PagedAttentionCall

ENTRIES: dict[str | None, PtxCallEntry] = {
    "_paged_decode_rare_sm80": PtxCallEntry("gm_paged_decode_sm80", "paged_attention"),
    "_paged_decode_more_rare_sm80": PtxCallEntry("gm_paged_decode_more_sm80", "paged_attention"),
    "_paged_decode_codes_rare_sm80": PtxCallEntry("gm_paged_decode_codes_sm80", "paged_attention"),
}


FLASH = PtxCallEntry("gm_paged_flash_sm80", "paged_attention")


def launch(config: Config, call: PagedAttentionCall) -> None:
    """The arguments of `paged_attention.reference`, then out [tokens, heads, D]. What runs follows from host-known bounds, so a captured graph
    replays what was captured.

    ValueError if the caches or out do not begin at multiples of 16 bytes or have strides that are none of 8 elements.
    """
    q, kv_heads, ctas = call.q, call.k_cache.shape[2], int(config["ctas"])
    tokens, heads, dim = q.shape
    codes, seqs = call.k_scale is not None, call.seq_lens.shape[0]
    if tokens == 0:
        return
    size = decode_bytes(dim, ctas)
    kernel = route(seqs, call.max_q, heads, kv_heads, dim, ctas, codes)
    if kernel == "triton":
        room = call.workspace
        behind = None if room is None else room.view(torch.uint8)[size:]
        launch_triton(config, call.replace(workspace=behind))
        return
    call = with_positive_scale(call)
    if call.workspace is None:
        room = torch.empty(size, dtype=torch.uint8, device=q.device)
        room[: parts_at(ctas)].zero_()
        call = call.replace(workspace=room)
    else:
        need_workspace("paged_attention", call.workspace, size, q.device)
    entry = FLASH if kernel == "flash" else ENTRIES[source(dim, codes)]
    options = {"ctas": ctas, "parts_at": parts_at(ctas), "keys": config.get("keys", 32)}
    entry.cuda(options, call, q.get_device())
