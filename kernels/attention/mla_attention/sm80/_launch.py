"""Launching latent attention on sm_80 and newer (`_mla_attention_rare_sm80.cu`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.attention.mla_attention.sm80.spec import ROWS, parts_at
from gristmill.kernels.attention.mla_attention.sm90.spec import LATENT
from gristmill.kernels.common import need_workspace
from gristmill.kernels.cuda_ptx_call import PtxCallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import MlaAttentionCall

ENTRY = PtxCallEntry("gm_mla_attention_sm80", "mla_attention")


def launch(config: Config, call: MlaAttentionCall) -> None:
    """The arguments of `mla_attention.reference`, then out [tokens, heads, 512]. What runs follows from host-known bounds, so a captured graph
    replays what was captured.

    ValueError if the cache or out do not begin at multiples of 16 bytes or have strides that are no multiples of 8 elements.
    """
    q, scale, workspace = call.q, call.scale, call.workspace
    if q.shape[0] == 0:
        return
    if scale <= 0.0:  # the kernel looks for the largest score, not for the smallest
        q, scale = q * (-1.0 if scale < 0.0 else 0.0), -scale or 1.0
    if q.data_ptr() % 16 or q.stride(0) % 8 or q.stride(1) % 8:
        q = q.contiguous()
    if not config["whole"]:
        ctas = int(config["ctas"])
        size = parts_at(ctas) + 2 * ctas * ROWS * (LATENT + 2) * 4
        if workspace is None:
            workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
        else:
            need_workspace("mla_attention", workspace, size, q.device)
    ENTRY.cuda(config, call.replace(q=q, scale=scale, workspace=workspace), q.get_device())
