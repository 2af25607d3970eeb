"""Counts of KV transfer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransferStatus:
    """The KV transfer of an engine since it was made.

    Attributes:
        stores: as in `KVTransfer`.
        queried_tokens: tokens that were looked up in the stores, because they were not in the prefix cache.
        loaded_tokens: those of them that were loaded instead of computed.
        loaded_blocks, saved_blocks: the number of blocks, over all groups of layers.
        loaded_bytes, saved_bytes: the bytes in these blocks.
        loading: requests that wait for blocks now.
        saving: copies that were not saved yet.
        answers: whether the store answers; while it does not, no request waits for it.
        failures: why blocks were computed, or not saved -> how often.
    """

    stores: tuple[str, ...]
    queried_tokens: int
    loaded_tokens: int
    loaded_blocks: int
    saved_blocks: int
    loaded_bytes: int
    saved_bytes: int
    loading: int
    saving: int
    answers: bool
    failures: Mapping[str, int]
