"""Launching the Hopper kernel of attention over dense sequences (`_varlen_attention_sm90.cu`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import VarlenAttentionCall

ENTRY = CallEntry("gm_varlen_attention_sm90", "varlen_attention")


def launch(config: Config, call: VarlenAttentionCall) -> None:
    """q, k and v are copied where rows do not begin at multiples of 16 bytes, or overlap. ValueError if those of out do not."""
    q, k, v, scale = call.q, call.k, call.v, call.scale
    if q.shape[0] == 0:
        return
    if scale <= 0.0:  # the kernel looks for the largest score, not for the smallest
        q, scale = q * (-1.0 if scale < 0.0 else 0.0), -scale or 1.0
    q, k, v = _whole_pieces(q), _whole_pieces(k), _whole_pieces(v)
    ENTRY.cuda(config, call.replace(q=q, k=k, v=v, scale=scale), q.get_device())


def _whole_pieces(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it that TMA takes: rows of 16-byte pieces, one after the other."""
    token, head, _ = tensor.stride()
    if tensor.data_ptr() % 16 or token % 8 or head % 8 or 0 in (token, head):
        return tensor.contiguous()
    return tensor
