"""Blocks of the paged cache as rows of bytes on the host, and back; copies are launched in the order of the steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gristmill.runtime.batch import send
from gristmill.runtime.cache import PagedCache
from gristmill.runtime.kv_transfer.records import HEADER
from gristmill.runtime.steps_in_flight import StreamEvent


class CacheBlocks:
    """The blocks of a cache in all its layers. nbytes: of a block. A row is a record: room for a header, then the block."""

    def __init__(self, cache: PagedCache, device: torch.device) -> None:
        self.cache = cache
        self.device = device
        self.nbytes = sum(view[0].numel() for view in self._views())

    def rows(self, count: int) -> Tensor:
        """Memory for records of `count` blocks: uint8 [count, HEADER + nbytes] on the host, pinned for a GPU."""
        size = (count, HEADER + self.nbytes)
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    @torch.inference_mode()
    def read(self, blocks: Sequence[int], rows: Tensor) -> StreamEvent | None:
        """Copy blocks into rows, behind all steps that were launched. Returns what to wait for before the rows are read; None = nothing."""
        on_host = self.device.type == "cpu"
        staged = rows if on_host else torch.empty(rows.shape, dtype=torch.uint8, device=self.device)
        chosen, place = send(list(blocks), torch.int64, self.device), HEADER
        for view in self._views():
            part = view.index_select(0, chosen).flatten(1)
            staged[:, place : place + part.shape[1]] = part
            place += part.shape[1]
        if on_host:
            return None
        rows.copy_(staged, non_blocking=True)
        event = StreamEvent(self.device)
        event.record()
        return event

    @torch.inference_mode()
    def write(self, blocks: Sequence[int], rows: Tensor) -> None:
        """Copy rows into blocks, behind all steps that were launched and before any later one."""
        staged = rows.to(self.device, non_blocking=True)
        chosen, place = send(list(blocks), torch.int64, self.device), HEADER
        for view in self._views():
            size = view[0].numel()
            view.index_copy_(0, chosen, staged[:, place : place + size].reshape(len(blocks), *view.shape[1:]))
            place += size

    def _views(self) -> list[Tensor]:
        """The memory of the cache as bytes, each tensor with the block first."""
        cache = self.cache
        storage = getattr(cache, "storage", None)  # an ExternalCache has tensors of layers only
        if storage is None:
            tensors = [tensor for layer in cache.layers for tensor in layer]
        else:
            tensors = [t.movedim(2, 0) for t in (storage, cache.scales) if t is not None]
        return [tensor.view(torch.uint8) for tensor in tensors]
