"""Inputs of decode steps: what differs between two steps of the same graph.

State of a request that no step changes is written when it joins its row: sampling parameters and the blocks it has. A step sends the rows
of its requests, in any order, and what follows from them. It is gathered in host memory that belongs to the step until it has ended, and
one copy sends it to the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import cdiv
from gristmill.runtime.batch import ALIGNMENT, Batch, with_groups
from gristmill.runtime.kv_cache.groups import first_needed
from gristmill.runtime.sampler import SamplingRow, SamplingTensors
from gristmill.runtime.scheduler import ScheduledRequest
from gristmill.runtime.steps_in_flight import DEPTH, SampledTokens

_COUNT, _START, _ROW, _TOKENS = map(attrgetter, ("count", "start", "row", "tokens"))
_INDEX = attrgetter("index")


class RowState:
    """Block tables and sampling parameters of the requests in rows 0 to rows - 1, on the host.

    Args:
        width: cache blocks of the longest request.
        windows: the windows of the groups of layers, each of which has tables.
        null: the block in places that no query reads any more.
    """

    def __init__(
        self, rows: int, width: int, vocab_size: int, windows: Sequence[int] = (0,), null: int = 0
    ) -> None:
        self.rows = rows
        self.windows, self.null = windows, null
        self.vocab_size = vocab_size
        self.table = np.zeros((len(windows), rows, width), np.int32)
        self.seed = np.zeros(rows, np.int64)
        self.top_k = np.zeros(rows, np.int32)
        self.temperature, self.top_p, self.min_p = np.zeros((3, rows), np.float32)
        # The block table of the request in each row, which is another list for each of its stays there, and how much of it is in `table`.
        self._tables: list[list[int] | None] = [None] * rows
        self._written = [0] * rows
        self._behind = np.zeros((len(windows), rows), np.int64)  # leading places with the null block

    def update(
        self, entries: Sequence[ScheduledRequest], rows: Sequence[SamplingRow], block_size: int
    ) -> list[int]:
        """Bring the state up to a step, whose entries all sample; the row of each entry. Entries without rows get the first ones, again
        in each step."""
        tables, written, windowed = self._tables, self._written, len(self.windows) > 1
        places = list(map(_ROW, entries))
        if min(places, default=0) < 0:
            places = list(range(len(entries)))
            for place in places:
                tables[place] = None
        for place, entry, row in zip(places, entries, rows, strict=True):
            blocks = entry.block_ids
            if tables[place] is not blocks:
                self._join(place, row)
                tables[place], written[place] = blocks, 0
                self._behind[:, place] = 0
            if written[place] < len(blocks):
                self._write(place, written[place], blocks)
                written[place] = len(blocks)
            if windowed:
                self._clear(place, entry.start, block_size)
        return places

    def held(self, places: Sequence[int]) -> tuple[list[list[int] | None], list[int]]:
        """The block tables of the requests in these rows, and how much of them is in `table`."""
        return [self._tables[place] for place in places], [self._written[place] for place in places]

    def _write(self, place: int, first: int, blocks: list[int]) -> None:
        """Add the entries of a request's tables from `first` on, which are interleaved."""
        groups, _, width = self.table.shape
        for group in range(groups):
            new = blocks[
                first + group : width * groups : groups
            ]  # a host may allocate more than a context can need
            self.table[group, place, first // groups : first // groups + len(new)] = new

    def _clear(self, place: int, start: int, block_size: int) -> None:
        """Put the null block where no query from position `start` on reads."""
        for group, window in enumerate(self.windows):
            first = first_needed(window, start, block_size)
            if first > self._behind[group, place]:
                self.table[group, place, :first] = self.null
                self._behind[group, place] = first

    def _join(self, place: int, row: SamplingRow) -> None:
        params = row.params
        self.seed[place] = row.seed
        self.top_k[place] = min(params.top_k, self.vocab_size)
        self.temperature[place] = params.temperature
        self.top_p[place] = params.top_p
        self.min_p[place] = params.min_p


@dataclass(frozen=True, slots=True)
class FilledTables:
    """What the block tables in the host memory of a step were filled with: those of the requests in these rows, and how much of each. `buffers`
    says which part of the memory they are."""

    buffers: Buffers
    state: RowState
    places: list[int]
    tables: list[list[int] | None]
    counts: list[int]


LONG = 2048
"""Cache blocks of a graph's contexts from which on only new ones are written to the block tables of a step: finding them takes as long as copying
so many for each request."""


class DecodeInputs:
    """The memory of all decode graphs' inputs, on the device and once on the host for each step in flight.

    Args:
        seqs: sequences of the largest graph.
        width: cache blocks of the longest context, in each of `groups` block tables.
    """

    def __init__(
        self, seqs: int, width: int, sampled: SampledTokens, depth: int = DEPTH, groups: int = 1
    ) -> None:
        device = sampled.values.device
        self.groups = groups
        size = sum(_sizes(seqs, width, groups=groups).values())
        self.sampled = sampled
        self.device = torch.zeros(size, dtype=torch.uint8, device=device)
        pinned = device.type == "cuda"
        self.host = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(depth)]
        self.filled: list[FilledTables | None] = [None] * depth


_TOKEN_PARTS: dict[str, torch.dtype] = {
    **dict.fromkeys(("tokens", "positions", "slots", "logit_rows", "seed", "index"), torch.int64),
    "top_k": torch.int32,
    **dict.fromkeys(("temperature", "top_p", "min_p"), torch.float32),
}
"""Parts with an element per token; slots have one in each group. The sampled rows are one after another in logit_rows (places of their
tokens) and what follows it."""
_SEQUENCE_PARTS: dict[str, torch.dtype] = {
    "rows": torch.int64,
    "seq_lens": torch.int32,
    "table": torch.int32,
    "on_device": torch.bool,
}
"""Parts with an element per sequence, and the block tables."""
_PARTS = dict(
    sorted((_TOKEN_PARTS | _SEQUENCE_PARTS).items(), key=lambda part: part[1].itemsize, reverse=True)
)


def _shape(name: str, seqs: int, width: int, per_seq: int, groups: int) -> tuple[int, ...]:
    if name == "table":
        return (groups, seqs, width)
    if name == "slots":
        return (groups, seqs * per_seq)
    return (seqs * per_seq,) if name in _TOKEN_PARTS else (seqs,)


def _sizes(seqs: int, width: int, per_seq: int = 1, groups: int = 1) -> dict[str, int]:
    """Bytes of each part, whole multiples of its alignment."""
    return {
        name: ALIGNMENT
        * cdiv(dtype.itemsize * math.prod(_shape(name, seqs, width, per_seq, groups)), ALIGNMENT)
        for name, dtype in _PARTS.items()
    }


class Buffers:
    """Inputs and outputs of decode steps of up to `seqs` sequences with up to `width` cache blocks and `per_seq` new tokens each: parts of
    `memory`.

    A step may have fewer tokens in a sequence: those that are missing at its end write nothing, and their logits are not computed.
    """

    def __init__(self, seqs: int, width: int, memory: DecodeInputs, per_seq: int = 1) -> None:
        self.seqs, self.width, self.memory, self.per_seq = seqs, width, memory, per_seq
        self._size = sum(_sizes(seqs, width, per_seq, memory.groups).values())
        device = memory.device.device
        parts = self.parts = self._split(memory.device)
        self.host: list[dict[str, Any]] = [
            {name: part.numpy() for name, part in self._split(host).items()} for host in memory.host
        ]
        self.query_start = torch.arange(seqs + 1, dtype=torch.int32, device=device) * per_seq
        self.last_rows = torch.arange(seqs, device=device)
        self.tokens = torch.zeros(seqs * per_seq, dtype=torch.int64, device=device)
        self.ids = torch.zeros(seqs * per_seq, dtype=torch.int64, device=device)
        self.sampling = SamplingTensors(
            *(parts[name] for name in ("temperature", "top_p", "min_p", "seed", "index", "top_k"))
        )

    def _split(self, memory: Tensor) -> dict[str, Tensor]:
        parts, start = {}, 0
        form = (self.seqs, self.width, self.per_seq, self.memory.groups)
        for name, size in _sizes(*form).items():
            shape, dtype = _shape(name, *form), _PARTS[name]
            parts[name] = memory[start : start + dtype.itemsize * math.prod(shape)].view(dtype).view(shape)
            start += size
        return parts

    def batch(self, bound: int) -> Batch:
        """The step for the layers; no context is longer than `bound`. rows: the tokens whose logits are computed; with one token per
        sequence they are all."""
        parts = self.parts
        batch = Batch(
            self.tokens,
            parts["positions"],
            parts["slots"][0],
            self.query_start,
            parts["seq_lens"],
            parts["table"][0],
            self.last_rows if self.per_seq == 1 else parts["logit_rows"],
            max_q=self.per_seq,
            max_ctx=bound,
            lengths=(),
        )
        return with_groups(batch, parts["slots"].unbind(), parts["table"].unbind())

    def fill(
        self,
        slot: int,
        entries: Sequence[ScheduledRequest],
        rows: Sequence[SamplingRow],
        state: RowState,
        block_size: int,
    ) -> None:
        """Write the inputs of a step to the host memory of this slot of the ring, which no copy reads."""
        host, seqs, width = self.host[slot], len(entries), self.per_seq
        counts = np.fromiter(map(_COUNT, entries), np.int64, seqs)
        firsts = rows
        if len(rows) > seqs:
            firsts = [rows[row] for row in (np.cumsum(counts) - counts).tolist()]
        rows_of = state.update(entries, firsts, block_size)
        self._fill_tables(slot, rows_of, state)
        places = np.array(rows_of, np.int64)
        starts = np.fromiter(map(_START, entries), np.int64, seqs)
        host["rows"][:seqs] = places
        host["seq_lens"][:seqs] = starts + width
        offsets = np.arange(width)
        known = offsets < counts[:, None]  # [seqs, per_seq]: whether there is such a token
        positions = np.where(known, starts[:, None] + offsets, 0)
        blocks = state.table[:, places[:, None], positions // block_size].astype(np.int64)
        slots = np.where(known, blocks * block_size + positions % block_size, -1)
        tokens = np.full(known.shape, -1, np.int64)
        if any(map(_TOKENS, entries)):  # else all are on the device, as in most steps of a large batch
            tokens[~known] = 0
            tokens[known] = [t for entry in entries for t in entry.tokens or (-1,)]
        host["slots"][:, : seqs * width] = slots.reshape(len(slots), -1)
        for name, values in (("positions", positions), ("tokens", tokens)):
            host[name][: seqs * width] = values.reshape(-1)
        host["on_device"][:seqs] = tokens[:, 0] < 0
        count = len(rows)
        host["logit_rows"][:count] = np.flatnonzero(known)
        host["index"][:count] = np.fromiter(map(_INDEX, rows), np.int64, count)
        places_of_rows = places.repeat(counts)
        for name in ("seed", "top_k", "temperature", "top_p", "min_p"):
            host[name][:count] = getattr(state, name)[places_of_rows]
        self._idle(slot, seqs, count)

    def _fill_tables(self, slot: int, places: list[int], state: RowState) -> None:
        """Bring the block tables in the host memory of a slot up to the requests in these rows. Padding has block 0."""
        host, width, memory = self.host[slot]["table"], self.width, self.memory
        last, now = memory.filled[slot], None
        if width >= LONG and len(state.windows) == 1:  # blocks behind a window are replaced
            now = FilledTables(self, state, places, *state.held(places))
        memory.filled[slot] = now
        if (
            now is not None
            and last is not None
            and last.buffers is self
            and last.state is state
            and last.places == places
            and all(map(is_, last.tables, now.tables))
        ):
            for row, (place, before, count) in enumerate(zip(places, last.counts, now.counts, strict=True)):
                if before < count:
                    new = slice(before, min(count, width))
                    host[:, row, new] = state.table[:, place, new]
            return
        for table, out in zip(state.table, host, strict=True):
            np.take(table[:, :width], places, axis=0, out=out[: len(places)], mode="clip")
        host[:, len(places) :] = 0

    def _idle(self, slot: int, seqs: int, count: int) -> None:
        """Pad the sequences from `seqs` on, with queries that read one key and write none, and the sampled rows from `count` on, which
        take the most likely token."""
        host, tokens = self.host[slot], seqs * self.per_seq
        for name in ("tokens", "positions"):
            host[name][tokens:] = 0
        host["slots"][:, tokens:] = -1
        host["rows"][seqs:] = self.memory.sampled.rows
        host["on_device"][seqs:] = False
        host["seq_lens"][seqs:] = self.per_seq
        for name in ("logit_rows", "temperature", "min_p", "seed", "index", "top_k"):
            host[name][count:] = 0
        host["top_p"][count:] = 1

    def send(self, slot: int) -> None:
        """Launch the copy of a slot's inputs to the device."""
        memory, size = self.memory, self._size
        memory.device[:size].copy_(memory.host[slot][:size], non_blocking=True)

    def clear(self) -> None:
        """Make a step of padding only of the inputs on the device, for a run without requests."""
        self.memory.device.zero_()
        idle = {"rows": self.memory.sampled.rows, "slots": -1, "seq_lens": self.per_seq, "top_p": 1}
        for name, value in idle.items():
            self.parts[name].fill_(value)

    def read_tokens(self) -> None:
        """On the device: tokens that the host knew, and those that the step before has sampled. With several tokens per sequence, the host
        knows all."""
        parts = self.parts
        if self.per_seq > 1:
            self.tokens.copy_(parts["tokens"])
            return
        sampled = self.memory.sampled.read(parts["rows"])
        torch.where(parts["on_device"], sampled, parts["tokens"], out=self.tokens)

    def write_tokens(self) -> None:
        """On the device: the sampled ids, for the step after this one. With several tokens per sequence, the host says first which of
        them count."""
        if self.per_seq == 1:
            self.memory.sampled.write(self.parts["rows"], self.ids)
