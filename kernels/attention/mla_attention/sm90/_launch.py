"""Launching the Hopper kernel of latent attention (`_mla_attention_sm90.cu`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.attention.mla_attention.sm90.spec import COUNTER_BYTES, PART_BYTES
from gristmill.kernels.common import need_workspace
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import MlaAttentionCall

ENTRY = CallEntry("gm_mla_attention_sm90", "mla_attention")


def launch(config: Config, call: MlaAttentionCall) -> None:
    """The heads of q are one after the other in memory, or q is copied. ValueError if the cache or out do not begin at
    multiples of 16 bytes or have strides that are no multiples of 8 elements.
    """
    q, scale, workspace = call.q, call.scale, call.workspace
    tokens, heads, _ = q.shape
    if tokens == 0:
        return
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
    ENTRY.cuda(config, call.replace(q=q, scale=scale, workspace=workspace), q.get_device())
