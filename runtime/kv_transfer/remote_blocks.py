"""Blocks of a model over several ranks: each rank copies its part of a block to or from a file that all of them map."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from gristmill.runtime.kv_transfer.blocks import CacheBlocks
from gristmill.runtime.kv_transfer.records import HEADER
from gristmill.runtime.parallel.driver import ParallelRunner
from gristmill.runtime.runner import Runner
from gristmill.runtime.steps_in_flight import StreamEvent

MEMORY = Path("/dev/shm")


class RemoteBlocks:
    """As `CacheBlocks`. A row has the parts of all ranks, one after the other. The driver waits for the copies.

    Methods raise RankError as those of `ParallelRunner`, and OSError if there is no memory for the file.
    """

    remote = True

    def __init__(self, runner: ParallelRunner) -> None:
        self._runner = runner
        self.block_size = runner.cache.block_size
        self.nbytes: int = sum(runner.call("copy_shared", "", [], False))

    def rows(self, count: int) -> Tensor:
        """As `CacheBlocks.rows`."""
        return torch.empty((count, HEADER + self.nbytes), dtype=torch.uint8)

    def read(self, blocks: Sequence[int], rows: Tensor) -> StreamEvent | None:
        """As `CacheBlocks.read`, when the copies have ended."""
        with self._shared(len(blocks)) as (path, memory):
            self._runner.call("copy_shared", path, list(blocks), False)
            rows[:, HEADER:] = memory
        return None

    def write(self, blocks: Sequence[int], rows: Tensor) -> None:
        """As `CacheBlocks.write`."""
        self._runner.ensure_started()
        with self._shared(len(blocks)) as (path, memory):
            memory.copy_(rows[:, HEADER:])
            self._runner.call("copy_shared", path, list(blocks), True)

    @contextmanager
    def _shared(self, count: int) -> Iterator[tuple[str, Tensor]]:
        """A file for `count` blocks, and its bytes [count, nbytes]."""
        descriptor, path = tempfile.mkstemp(prefix="gristmill-kv-", dir=MEMORY if MEMORY.is_dir() else None)
        try:
            os.posix_fallocate(
                descriptor, 0, count * self.nbytes
            )  # so that too little memory is an error, and no signal
            yield path, _mapped(path, count * self.nbytes).view(count, self.nbytes)
        finally:
            os.close(descriptor)
            os.unlink(path)


def copy_shared(runner: Runner, rank: int, world: int, path: str, blocks: Sequence[int], write: bool) -> int:
    """What a rank does: copy its part of blocks from (`write`) or to a file [blocks, world, bytes]. Returns its bytes of a block."""
    copies = CacheBlocks(runner.cache, runner.device)
    if not blocks:
        return copies.nbytes
    rows = copies.rows(len(blocks))
    memory = _mapped(path, len(blocks) * world * copies.nbytes).view(len(blocks), world, -1)[:, rank]
    if write:
        rows[:, HEADER:] = memory
        copies.write(blocks, rows)
    else:
        if (event := copies.read(blocks, rows)) is not None:
            event.synchronize()
        memory.copy_(rows[:, HEADER:])
    return copies.nbytes


def _mapped(path: str, size: int) -> Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
