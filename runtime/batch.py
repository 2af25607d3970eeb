"""One step as tensors for the layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gristmill.runtime.scheduler import ScheduledRequest


@dataclass(frozen=True)
class Batch:
    """New tokens of several sequences, one sequence after another.

    tokens, positions: int64 [T]. slots: int64 [T], block · block_size + offset of each token's place in the cache.
    query_start: int32 [S + 1], where each sequence's tokens begin. seq_lens: int32 [S], context lengths with the new
    tokens. block_table: int32 [S, width]. max_q, max_ctx: most new tokens, longest context. rows: int64, the tokens whose
    logits are computed. fresh: no sequence has cached tokens before this step.
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
    fresh: bool


def make_batch(
    entries: Sequence[ScheduledRequest], block_size: int, device: torch.device, all_rows: bool = False
) -> Batch:
    """The tensors of the entries of a committed plan, sent to the device in two copies. A token that is on the device only is 0 here;
    see `make_feedback`.

    rows: the last 1 + drafts tokens of each entry that samples, in order; with `all_rows`, every token.
    """
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    rows: list[int] = []
    starts, contexts = [0], []
    width = max(len(entry.block_ids) for entry in entries)
    table: list[int] = []
    for entry in entries:
        tokens += [0] if entry.tokens is None else entry.tokens
        positions += range(entry.start, entry.start + entry.count)
        slots += entry.slots(block_size)
        starts.append(len(tokens))
        contexts.append(entry.context)
        table += entry.block_ids
        table += [0] * (width - len(entry.block_ids))
        if entry.samples:
            rows += range(len(tokens) - 1 - entry.drafts, len(tokens))
    if all_rows:
        rows = list(range(len(tokens)))
    total, seqs = len(tokens), len(entries)
    int64_values = send([*tokens, *positions, *slots, *rows], torch.int64, device)
    int32_values = send([*starts, *contexts, *table], torch.int32, device)
    return Batch(
        tokens=int64_values[:total],
        positions=int64_values[total : 2 * total],
        slots=int64_values[2 * total : 3 * total],
        rows=int64_values[3 * total :],
        query_start=int32_values[: seqs + 1],
        seq_lens=int32_values[seqs + 1 : 2 * seqs + 1],
        block_table=int32_values[2 * seqs + 1 :].view(seqs, width),
        max_q=max(entry.count for entry in entries),
        max_ctx=max(contexts),
        fresh=all(entry.start == 0 for entry in entries),
    )


@dataclass(frozen=True)
class Feedback:
    """Where the tokens of a step come from and go to, on the device; int64.

    places: [F], tokens of the batch that a step before has sampled. read_rows: [F], the rows of their requests. write_rows: [samples], the
    rows of the requests that sample, in order.
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
    values = send([*places, *read_rows, *write_rows], torch.int64, device)
    count = len(places)
    return Feedback(values[:count], values[count : 2 * count], values[2 * count :])


def send(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A list of numbers as a tensor on the device, copied without synchronization."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
