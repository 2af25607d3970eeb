"""Blocks of the paged cache as rows of bytes on the host, and back; copies are launched in the order of the steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from gristmill.runtime.batch import send
from gristmill.runtime.kv_cache.paged import PagedCache
from gristmill.runtime.kv_transfer.records import HEADER
from gristmill.runtime.steps_in_flight import StreamEvent


class Blocks(Protocol):
    """What a transfer copies: `CacheBlocks`, or those of several ranks (`remote`), whose calls may raise RankError."""

    remote: bool
    block_size: int
    nbytes: int

    def rows(self, count: int) -> Tensor:
        """As `CacheBlocks.rows`."""
        ...

    def read(self, blocks: Sequence[int], rows: Tensor) -> StreamEvent | None:
        """As `CacheBlocks.read`."""
        ...

    def write(self, blocks: Sequence[int], rows: Tensor) -> None:
        """As `CacheBlocks.write`."""
        ...


STAGED = 64 << 20
"""Bytes of a device that a copy takes."""


class CacheBlocks:
    """The blocks of a cache in all its layers. A row is a record: room for a header, then the block of `nbytes` bytes and `block_size` tokens."""

    remote = False

    def __init__(self, cache: PagedCache, device: torch.device) -> None:
        self.cache = cache
        self.device = device
        self.block_size = cache.block_size
        self.nbytes = sum(view[0].numel() for view in self._views())

    def rows(self, count: int) -> Tensor:
        """Memory for records of `count` blocks: uint8 [count, HEADER + nbytes] on the host, pinned for a GPU."""
        size = (count, HEADER + self.nbytes)
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    @torch.inference_mode()
    def read(self, blocks: Sequence[int], rows: Tensor) -> StreamEvent | None:
        """Copy blocks into rows, after all steps that were launched. Returns what to wait for before the rows are read; None = nothing."""
        for chosen, part in self._parts(blocks, rows):
            on_host = self.device.type == "cpu"
            staged = part if on_host else torch.empty(part.shape, dtype=torch.uint8, device=self.device)
            place = HEADER
            for view in self._views():
                values = view.index_select(0, chosen).flatten(1)
                staged[:, place : place + values.shape[1]] = values
                place += values.shape[1]
            if not on_host:
                part.copy_(staged, non_blocking=True)
        if self.device.type == "cpu":
            return None
        event = StreamEvent(self.device)
        event.record()
        return event

    @torch.inference_mode()
    def write(self, blocks: Sequence[int], rows: Tensor) -> None:
        """Copy rows into blocks, after all steps that were launched and before any later one."""
        for chosen, part in self._parts(blocks, rows):
            staged, place = part.to(self.device, non_blocking=True), HEADER
            for view in self._views():
                size = view[0].numel()
                values = staged[:, place : place + size].reshape(len(chosen), *view.shape[1:])
                view.index_copy_(0, chosen, values)
                place += size

    def _parts(self, blocks: Sequence[int], rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(blocks, rows) in parts of at most `STAGED` bytes, so that little memory of a device is needed in addition to the cache."""
        per = max(1, STAGED // (HEADER + self.nbytes))
        for first in range(0, len(blocks), per):
            yield (
                send(blocks[first : first + per], torch.int64, self.device),
                rows[first : first + per],
            )

    def _views(self) -> list[Tensor]:
        """The memory of the cache as bytes, each tensor with the block first."""
        cache = self.cache
        storage = getattr(cache, "storage", None)  # an ExternalCache has tensors of layers only
        if storage is None:
            tensors = [*{tensor.data_ptr(): tensor for layer in cache.layers for tensor in layer}.values()]
        else:
            tensors = [t.movedim(2, 0) for t in (storage, cache.scales) if t is not None]
        return [tensor.view(torch.uint8) for tensor in tensors]
