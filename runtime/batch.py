"""One step as tensors for the layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gristmill.runtime.scheduler import ScheduledRequest

T = TypeVar("T")


@dataclass(frozen=True)
class ContextShard:
    """The part of each token's context that is in the cache of this rank, if ranks share a context (`layers.context_parallel`). Every token is a
    sequence of its own.

    Attributes:
        block_table: int32 [T, width].
        query_start: int32 [T + 1].
        seq_lens: int32 [T], at least 1.
        max_ctx: the longest of them.
        empty: bool [T], whether the rank has no key of a context; the 1 in seq_lens then does not count.
    """

    block_table: Tensor
    query_start: Tensor
    seq_lens: Tensor
    max_ctx: int
    empty: Tensor


class Cuts(NamedTuple):
    """How a step that is captured in pieces is cut (`prompt_graphs`).

    Attributes:
        memory: (name, shape, dtype) -> memory that is the same in each step.
        apart: takes what runs between two pieces, and the group of the batch.
    """

    memory: Callable[[str, tuple[int, ...], torch.dtype], Tensor]
    apart: Callable[[Callable[[Batch], None], int], None]


@dataclass(frozen=True)
class Batch:
    """New tokens of several sequences, one sequence after another: T tokens of S sequences.

    Attributes:
        tokens, positions: int64 [T].
        slots: int64 [T], block * block_size + offset of each token's place in the cache.
        query_start: int32 [S + 1], where the tokens of each sequence begin.
        seq_lens: int32 [S], context lengths, new tokens included.
        block_table: int32 [S, width].
        rows: int64, the tokens whose logits are computed.
        max_q, max_ctx: the most new tokens, and the longest context.
        lengths: new tokens and context of each sequence, if the host knows them; () in a step that is captured.
        others: the step for the other groups of layers (`kv_cache.groups`), with their own slots and block tables.
        context_shard: None = the cache has the whole context of each token.
        group: the group of layers that it is for.
        cuts: None = the step is not captured in pieces.
        left_out: layers that a rehearsal does not run (`layer_kinds`).
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor
    rows: Tensor
    max_q: int
    max_ctx: int
    lengths: tuple[tuple[int, int], ...]
    others: tuple[Batch, ...] = ()
    context_shard: ContextShard | None = None
    group: int = 0
    cuts: Cuts | None = None
    left_out: frozenset[int] = frozenset()
    _derived: dict[str, object] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, name: str, make: Callable[[], T]) -> T:
        """The result of `make`, called by the first layer that needs it and shared by all layers of a step."""
        if name not in self._derived:
            self._derived[name] = make()
        return cast("T", self._derived[name])

    def empty(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """Memory in the dtype of `like` for what a call `apart` reads or writes. It is valid until the next one of this name is taken."""
        return like.new_empty(shape) if self.cuts is None else self.cuts.memory(name, shape, like.dtype)

    def apart(self, call: Apart) -> None:
        """`call(self)`. What depends on the lengths of sequences goes here: with a step that is captured in pieces, it runs between two of
        them, with the batch of the actual step, which has fewer tokens than the tensors of padded layers."""
        if self.cuts is None:
            call(self)
        else:
            self.cuts.apart(call, self.group)


Apart = Callable[[Batch], None]


def make_batch(
    entries: Sequence[ScheduledRequest],
    block_size: int,
    device: torch.device,
    all_rows: bool = False,
    groups: int = 1,
) -> Batch:
    """The tensors of the entries of a committed step, sent to the device in two copies. A token that is on the device only is 0 here;
    see `make_feedback`.

    rows: the last 1 + drafts tokens of each entry that samples, in order; with `all_rows`, every token.
    """
    tokens: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    starts, contexts = [0], []
    width = max(len(entry.block_ids) for entry in entries) // groups
    for entry in entries:
        tokens += [0] if entry.tokens is None else entry.tokens
        positions += range(entry.start, entry.start + entry.count)
        starts.append(len(tokens))
        contexts.append(entry.context)
        if entry.samples:
            rows += range(len(tokens) - 1 - entry.drafts, len(tokens))
    slots: list[list[int]] = []
    tables: list[list[int]] = []
    for group in range(groups):
        slots.append([])
        tables.append([])
        for entry in entries:
            slots[-1] += entry.slots(block_size, group, groups)
            blocks = entry.block_ids if groups == 1 else entry.block_ids[group::groups]
            tables[-1] += blocks
            tables[-1] += [0] * (width - len(blocks))
    if all_rows:
        rows = list(range(len(tokens)))
    sent_tokens, sent_positions, sent_rows, *sent_slots = send_parts(
        (tokens, positions, rows, *slots), torch.int64, device
    )
    query_start, seq_lens, *sent_tables = send_parts((starts, contexts, *tables), torch.int32, device)
    block_tables = [table.view(len(entries), width) for table in sent_tables]
    batch = Batch(
        tokens=sent_tokens,
        positions=sent_positions,
        slots=sent_slots[0],
        rows=sent_rows,
        query_start=query_start,
        seq_lens=seq_lens,
        block_table=block_tables[0],
        max_q=max(entry.count for entry in entries),
        max_ctx=max(contexts),
        lengths=tuple((entry.count, entry.context) for entry in entries),
    )
    return with_groups(batch, sent_slots, block_tables)


def with_groups(batch: Batch, slots: Sequence[Tensor], tables: Sequence[Tensor]) -> Batch:
    """The batch, with those of the groups after the first; slots [T] and tables [S, width] of each group."""
    if len(slots) == 1:
        return batch
    others = zip(slots[1:], tables[1:], range(1, len(slots)), strict=True)
    return replace(batch, others=tuple(replace(batch, slots=s, block_table=t, group=g) for s, t, g in others))


def shard_context(batch: Batch, rank: int, world: int, block_size: int) -> Batch:
    """The batch of one of `world` ranks, each with `block_size` tokens of every block of the batch: with its slots, -1 for tokens of
    others, and its part of the contexts."""
    whole = world * block_size
    offsets = batch.slots % whole
    slots = batch.slots // whole * block_size + offsets % block_size
    slots = torch.where(offsets // block_size == rank, slots, -1)

    def kept(tokens: Tensor) -> Tensor:
        return tokens // whole * block_size + (tokens % whole - rank * block_size).clamp(0, block_size)

    count, device = len(batch.tokens), batch.tokens.device
    lengths = kept(batch.positions + 1)
    shard = ContextShard(
        batch.block_table.repeat_interleave(batch.query_start.diff(), 0, output_size=count),
        torch.arange(count + 1, dtype=torch.int32, device=device),
        lengths.clamp(min=1).to(torch.int32),
        max(1, int(kept(torch.tensor(batch.max_ctx)))),
        lengths == 0,
    )
    return replace(batch, slots=slots, context_shard=shard)


@dataclass(frozen=True)
class Feedback:
    """Where the tokens of a step come from and go to on the device, int64.

    Attributes:
        places: [F], tokens of the batch that an earlier step has sampled.
        read_rows: [F], the rows of their requests.
        write_rows: [samples], the rows of the requests that sample, in order.
    """

    places: Tensor
    read_rows: Tensor
    write_rows: Tensor


def make_feedback(entries: Sequence[ScheduledRequest], device: torch.device) -> Feedback | None:
    """The feedback of a step; None if its entries have no rows, or drafts, so that no step follows before its ids are known."""
    if any(entry.row < 0 or entry.drafts for entry in entries):
        return None
    places, read_rows, write_rows = [], [], []
    place = 0
    for entry in entries:
        if entry.tokens is None:
            places.append(place)
            read_rows.append(entry.row)
        if entry.samples:
            write_rows.append(entry.row)
        place += entry.count
    return Feedback(*send_parts((places, read_rows, write_rows), torch.int64, device))


def send(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A list of numbers as a tensor on the device, copied without synchronization."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def fetch(values: Tensor) -> Tensor:
    """A copy of a device's tensor in host memory, without synchronization: it is there when the work launched so far has ended."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.device.type == "cuda")
    return host.copy_(values, non_blocking=True)


ALIGNMENT = 16
"""Bytes to which every part of a copy is aligned, as memory of its own is: Triton compiles a kernel again for less aligned arguments."""


def send_arrays(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Arrays of any shapes and dtypes as tensors on the device, each aligned, in one copy without synchronization."""
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    host = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    octets = host.numpy()
    parts = []
    for start, array in zip(starts, arrays, strict=True):
        contiguous = np.ascontiguousarray(array)
        octets[start : start + array.nbytes] = contiguous.reshape(-1).view(np.uint8)
        parts.append(torch.from_numpy(contiguous))
    sent = host.to(device, non_blocking=True)
    typed = {dtype: sent.view(dtype) for dtype in {part.dtype for part in parts}}
    return [
        typed[part.dtype].as_strided(part.shape, part.stride(), start // part.itemsize)
        for start, part in zip(starts, parts, strict=True)
    ]


def columns(values: Sequence[Sequence[float]], dtype: type[np.generic]) -> NDArray[Any]:
    """Lists of equal lengths n, one after another as rows of an array [lists, at least n], each aligned: sent as one array, cut to n and unbound,
    they are tensors as `send_arrays` returns them, in fewer calls than one for each."""
    count, unit = len(values[0]), ALIGNMENT // np.dtype(dtype).itemsize
    array = np.zeros((len(values), -(-count // unit) * unit), dtype)
    array[:, :count] = values
    return array


def send_parts(parts: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Lists of numbers as tensors on the device, in one copy without synchronization. For short lists, it takes half the time of `send_arrays`."""
    unit = ALIGNMENT // dtype.itemsize
    values: list[float] = []
    starts = []
    for part in parts:
        starts.append(len(values))
        values += part
        values += [0] * (-len(part) % unit)
    sent = send(values, dtype, device)
    return [sent[start : start + len(part)] for start, part in zip(starts, parts, strict=True)]
