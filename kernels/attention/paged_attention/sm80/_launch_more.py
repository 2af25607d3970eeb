"""Launching paged attention on sm_80 and newer over e4m3 caches, and of heads of 80, 96 and 192 elements: as _launch.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.attention.paged_attention.sm80._launch import ENTRIES
from gristmill.kernels.attention.paged_attention.sm80.more import flash_source, room, route
from gristmill.kernels.attention.paged_attention.sm80.spec import parts_at, source
from gristmill.kernels.attention.paged_attention.sm90._launch import with_positive_scale
from gristmill.kernels.attention.paged_attention.triton import launch_split as launch_triton
from gristmill.kernels.common import need_workspace
from gristmill.kernels.cuda_ptx_call import PtxCallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import PagedAttentionCall

FLASH: dict[str | None, PtxCallEntry] = {
    "_paged_flash_more_rare_sm80": PtxCallEntry("gm_paged_flash_more_sm80", "paged_attention"),
    "_paged_flash_codes_rare_sm80": PtxCallEntry("gm_paged_flash_codes_sm80", "paged_attention"),
}


def launch(config: Config, call: PagedAttentionCall) -> None:
    """The arguments of `paged_attention.reference`, then out [tokens, heads, D]. What runs follows from host-known bounds, so a captured graph
    replays what was captured.

    ValueError if the caches or out do not begin at multiples of 16 bytes or have strides that are none of 8 elements, of 16 codes.
    """
    tokens, heads, dim = call.q.shape
    if tokens == 0:
        return
    ctas, codes, device = int(config["ctas"]), call.k_scale is not None, call.q.device
    kernel = route(call.seq_lens.shape[0], call.max_q, heads, call.k_cache.shape[2], dim, ctas, codes)
    size, given = room(dim, ctas), call.workspace
    if kernel == "triton":
        behind = None if given is None else given.view(torch.uint8)[size:]
        launch_triton(config, call.replace(workspace=behind))
        return
    if given is None:
        given = torch.empty(size, dtype=torch.uint8, device=device)
        given[: parts_at(ctas)].zero_()
    else:
        need_workspace("paged_attention", given, size, device)
    entry = FLASH[flash_source(dim, codes)] if kernel == "flash" else ENTRIES[source(dim, codes)]
    options = {"ctas": ctas, "parts_at": parts_at(ctas)}
    entry.cuda(options, with_positive_scale(call).replace(workspace=given), call.q.get_device())
