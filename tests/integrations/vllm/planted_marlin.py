"""Marlin's experts of 4 bits in torch, in place of vLLM's kernel for GPUs: everything around it, such as the method that a layer has on a GPU, is
vLLM's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
from vllm.model_executor.layers.fused_moe.oracle import int_wna16
from vllm.v1.worker import workspace


class Marlin:
    """What a call of the planted kernel does, and how often weights were packed for it.

    Attributes:
        seconds: how long a call takes, by `clock`.
        error: what a call raises instead.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
        self.clock, self.seconds, self.packed = clock, 0.0, 0
        self.error: Exception | None = None
        for place, name, value in (
            (int_wna16, "_get_priority_backends", lambda: [int_wna16.WNA16MoEBackend.MARLIN]),
            (int_wna16, "marlin_moe_permute_scales", lambda s, **_: s),
            (int_wna16.ops, "gptq_marlin_moe_repack", self.repack),
            (MarlinExperts, "_supports_current_device", staticmethod(lambda: True)),
            (MarlinExperts, "apply", lambda experts, *given, **named: self(experts, *given, **named)),
            (workspace, "_manager", workspace.WorkspaceManager(torch.device("cpu"))),
        ):
            monkeypatch.setattr(place, name, value)

    def repack(self, packed: Tensor, *_: Any, **__: Any) -> Tensor:
        """int32 [E, K / 8, N], 8 rows in a number -> [E, K / 16, 2 N], Marlin's shape."""
        self.packed += 1
        experts, rows, columns = packed.shape
        return packed.reshape(experts, rows // 2, columns * 2)

    def __call__(
        self,
        experts: Any,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        **_: Any,
    ) -> None:
        """One call of the kernel. It writes no more than 16 tokens: a prompt, token by token, takes seconds."""
        if self.error is not None:
            raise self.error
        self.clock[0] += self.seconds
        if len(hidden_states) > 16:
            return
        w13, down = _dense(w1, experts.w1_scale), _dense(w2, experts.w2_scale)
        for token, x in enumerate(hidden_states):
            ids = topk_ids[token].long()
            gate, up = (x @ w13[ids]).chunk(2, -1)
            each = ((silu(gate) * up).unsqueeze(1) @ down[ids]).squeeze(1)
            output[token] = topk_weights[token] @ each


def _dense(packed: Tensor, scale: Tensor) -> Tensor:
    """Of `Marlin.repack`, and scales [E, K / 128, N] -> [E, K, N]."""
    experts, rows, columns = packed.shape
    words = packed.reshape(experts, rows * 2, 1, columns // 2)
    codes = ((words >> torch.arange(0, 32, 4)[:, None]) & 15).flatten(1, 2)
    return (codes - 8) * scale.repeat_interleave(128, 1)
