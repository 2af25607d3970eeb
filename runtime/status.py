"""Capacity and load of an engine, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gristmill.runtime.kv_transfer.statistics import TransferStatus
from gristmill.runtime.speculation.statistics import SpeculationStatus

State = Literal["running", "paused", "draining", "sleeping", "outdated"]


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """An engine between two steps.

    Attributes:
        state: ``running`` (also without requests), ``paused``, ``draining``, ``sleeping``, or ``outdated`` (its weights were discarded).
        running, waiting: requests with cache blocks, and without.
        waiting_tokens: prompt tokens of those waiting.
        num_blocks, block_size: blocks of the cache, and tokens per block.
        used_blocks, cached_blocks: blocks of requests, and blocks that hold shareable prefixes of earlier requests.
        max_request_tokens: longest prompt and output of one request.
        max_seqs, max_batch_tokens: requests and tokens per step.
        weight_bytes, cache_bytes: resident bytes, without those of a draft model.
        graph_bytes: bytes that decode graphs take, likewise; None with tensor_parallel.
        late_kernels: kernels that were selected, or by Triton compiled or loaded, after the warm-up, while requests waited; 0 without a
            warm-up, None with tensor_parallel.
        speculation: counts of drafts; None = the engine does not draft.
        kv_transfer: counts of blocks; None = the engine has no stores.
    """

    state: State
    running: int
    waiting: int
    waiting_tokens: int
    num_blocks: int
    block_size: int
    used_blocks: int
    cached_blocks: int
    max_request_tokens: int
    max_seqs: int
    max_batch_tokens: int
    weight_bytes: int
    cache_bytes: int
    graph_bytes: int | None = 0
    late_kernels: int | None = 0
    speculation: SpeculationStatus | None = None
    kv_transfer: TransferStatus | None = None
