"""Lengths of a decode step in memory that stays: a CUDA graph that vLLM has captured reads them there in every step that replays it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class DecodeBuffers:
    """The lengths of steps in which every request has one new token.

    vLLM pads such a step to the size of its graph with requests that have no token and no context. Here each of them has one of both, as
    kernels have it in graphs of the runtime: it reads the cache's block 0, and nothing reads its row.
    """

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        largest = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        seqs = max(vllm_config.scheduler_config.max_num_seqs, largest)
        self.query_start = torch.arange(seqs + 1, dtype=torch.int32, device=device)
        self._seq_lens = torch.ones(seqs, dtype=torch.int32, device=device)

    def lengths(self, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
        """int32 query_start [n + 1] and seq_lens [n] of a step with these contexts int32 [n], valid until the next step."""
        count = len(seq_lens)
        return self.query_start[: count + 1], torch.clamp(seq_lens, min=1, out=self._seq_lens[:count])
