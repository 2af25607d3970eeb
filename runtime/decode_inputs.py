"""Inputs of decode steps: what differs between two steps of the same graph.

State of a request that no step changes is written when it joins its row: sampling parameters and the blocks it has. A step sends the rows
of its requests, in any order, and what follows from them. It is gathered in host memory that belongs to the step until it has ended, and
one copy sends it to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gristmill.runtime.batch import Batch
from gristmill.runtime.sampler import SamplingRow, SamplingTensors
from gristmill.runtime.scheduler import ScheduledRequest
from gristmill.runtime.steps_in_flight import DEPTH, SampledTokens


class RowState:
    """Block tables and sampling parameters of the requests in rows 0 to rows - 1, on the host. width: cache blocks of the longest
    request."""

    def __init__(self, rows: int, width: int, vocab_size: int) -> None:
        self.rows = rows
        self.vocab_size = vocab_size
        self.table = np.zeros((rows, width), np.int32)
        self.seed = np.zeros(rows, np.int64)
        self.top_k = np.zeros(rows, np.int32)
        self.temperature, self.top_p, self.min_p = np.zeros((3, rows), np.float32)
        # The block table of the request in each row, which is another list for each of its stays there, and how much of it is in `table`.
        self._tables: list[list[int] | None] = [None] * rows
        self._written = [0] * rows

    def update(self, entries: Sequence[ScheduledRequest], rows: Sequence[SamplingRow]) -> list[int]:
        """Bring the state up to a step, whose entries all sample; the row of each entry. Entries without rows get the first ones, anew
        in each step."""
        tables, written = self._tables, self._written
        places = [entry.row for entry in entries]
        if min(places, default=0) < 0:
            places = list(range(len(entries)))
            for place in places:
                tables[place] = None
        for place, entry, row in zip(places, entries, rows, strict=True):
            blocks = entry.block_ids
            if tables[place] is not blocks:
                self._join(place, row)
                tables[place], written[place] = blocks, 0
            if written[place] < len(blocks):
                new = blocks[
                    written[place] : self.table.shape[1]
                ]  # a host may allocate more than a context can need
                self.table[place, written[place] : written[place] + len(new)] = new
                written[place] = len(blocks)
        return places

    def _join(self, place: int, row: SamplingRow) -> None:
        params = row.params
        self.seed[place] = row.seed
        self.top_k[place] = min(params.top_k, self.vocab_size)
        self.temperature[place] = params.temperature
        self.top_p[place] = params.top_p
        self.min_p[place] = params.min_p


class DecodeInputs:
    """The memory of all decode graphs' inputs, on the device and once on the host for each step in flight.

    seqs: of the largest graph. width: cache blocks of the longest context.
    """

    def __init__(self, seqs: int, width: int, sampled: SampledTokens, depth: int = DEPTH) -> None:
        device = sampled.values.device
        size = sum(_sizes(seqs, width).values())
        self.sampled = sampled
        self.device = torch.zeros(size, dtype=torch.uint8, device=device)
        pinned = device.type == "cuda"
        self.host = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(depth)]


_PARTS: dict[str, torch.dtype] = {
    # 8-byte elements first, so that each part is aligned.
    **dict.fromkeys(("tokens", "positions", "slots", "rows", "seed", "index"), torch.int64),
    **dict.fromkeys(("seq_lens", "top_k"), torch.int32),
    **dict.fromkeys(("temperature", "top_p", "min_p"), torch.float32),
    "table": torch.int32,
    "on_device": torch.bool,
}


def _sizes(seqs: int, width: int) -> dict[str, int]:
    """Bytes of each part."""
    return {name: dtype.itemsize * seqs * (width if name == "table" else 1) for name, dtype in _PARTS.items()}


class Buffers:
    """Inputs and outputs of decode steps of up to `seqs` sequences with up to `width` cache blocks each: parts of `memory`."""

    def __init__(self, seqs: int, width: int, memory: DecodeInputs) -> None:
        self.seqs, self.width, self.memory = seqs, width, memory
        self._size = sum(_sizes(seqs, width).values())
        device = memory.device.device
        parts = self.parts = self._split(memory.device)
        self.host: list[dict[str, Any]] = [
            {name: part.numpy() for name, part in self._split(host).items()} for host in memory.host
        ]
        self.query_start = torch.arange(seqs + 1, dtype=torch.int32, device=device)
        self.last_rows = torch.arange(seqs, device=device)
        self.tokens = torch.zeros(seqs, dtype=torch.int64, device=device)
        self.ids = torch.zeros(seqs, dtype=torch.int64, device=device)
        self.sampling = SamplingTensors(
            *(parts[name] for name in ("temperature", "top_p", "min_p", "seed", "index", "top_k"))
        )

    def _split(self, memory: Tensor) -> dict[str, Tensor]:
        parts, start = {}, 0
        for name, size in _sizes(self.seqs, self.width).items():
            shape = (self.seqs, self.width) if name == "table" else (self.seqs,)
            parts[name] = memory[start : start + size].view(_PARTS[name]).view(shape)
            start += size
        return parts

    def batch(self, bound: int) -> Batch:
        """The step for the layers; no context is longer than `bound`."""
        parts = self.parts
        return Batch(
            self.tokens,
            parts["positions"],
            parts["slots"],
            self.query_start,
            parts["seq_lens"],
            parts["table"],
            self.last_rows,
            max_q=1,
            max_ctx=bound,
            fresh=False,
        )

    def fill(
        self,
        slot: int,
        entries: Sequence[ScheduledRequest],
        rows: Sequence[SamplingRow],
        state: RowState,
        block_size: int,
    ) -> None:
        """Write the inputs of a step to the host memory of this slot of the ring, which no copy reads."""
        host, count = self.host[slot], len(entries)
        places = np.array(state.update(entries, rows), np.int64)
        starts = np.array([entry.start for entry in entries], np.int64)
        host["rows"][:count] = places
        host["positions"][:count] = starts
        host["seq_lens"][:count] = starts + 1
        blocks = state.table[places, starts // block_size].astype(np.int64)
        host["slots"][:count] = blocks * block_size + starts % block_size
        np.take(state.table[:, : self.width], places, axis=0, out=host["table"][:count], mode="clip")
        tokens = [-1 if entry.tokens is None else entry.tokens[0] for entry in entries]
        host["tokens"][:count] = tokens
        host["on_device"][:count] = host["tokens"][:count] < 0
        host["index"][:count] = [row.index for row in rows]
        for name in ("seed", "top_k", "temperature", "top_p", "min_p"):
            host[name][:count] = getattr(state, name)[places]
        self._idle(slot, count)

    def _idle(self, slot: int, count: int) -> None:
        """Pad the slots from `count` on: a query that reads one key, writes none, and takes the most likely token."""
        host = self.host[slot]
        for name in ("tokens", "positions", "temperature", "min_p", "seed", "index", "top_k", "table"):
            host[name][count:] = 0
        host["rows"][count:] = self.memory.sampled.rows
        host["on_device"][count:] = False
        host["slots"][count:] = -1
        host["seq_lens"][count:] = 1
        host["top_p"][count:] = 1

    def send(self, slot: int) -> None:
        """Launch the copy of a slot's inputs to the device."""
        memory, size = self.memory, self._size
        memory.device[:size].copy_(memory.host[slot][:size], non_blocking=True)

    def clear(self) -> None:
        """Make a step of padding only of the inputs on the device, for a run without requests."""
        self.memory.device.zero_()
        for name, value in (("rows", self.memory.sampled.rows), ("slots", -1), ("seq_lens", 1), ("top_p", 1)):
            self.parts[name].fill_(value)

    def read_tokens(self) -> None:
        """On the device: tokens that the host knew, and those that the step before has sampled."""
        parts = self.parts
        sampled = self.memory.sampled.read(parts["rows"])
        torch.where(parts["on_device"], sampled, parts["tokens"], out=self.tokens)

    def write_tokens(self) -> None:
        """On the device: the sampled ids, for the step after this one."""
        self.memory.sampled.write(self.parts["rows"], self.ids)
