"""The scheduler of latent attention for Hopper executed on the CPU (`_mla_work_sm90.cuh`): every visible tile of keys is in one part of its task, and
the parts of a task are where its merge looks for them."""

from __future__ import annotations

import ctypes
import random
import shutil
from collections import defaultdict
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from gristmill.kernel_registry.scheme import cdiv
from tests.native import compiled_library

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
ROWS = KEYS = 64
"""Of a task, and of a tile."""
MOST = 1 << 14


class Work(NamedTuple):
    """What a range processes of a task. kind to first_range: MlaWork."""

    ticket: int
    seq: int
    kind: int
    token: int
    row0: int
    rows: int
    position: int
    first: int
    tiles: int
    end: int
    slot: int
    part: int
    parts: int
    first_range: int


class Batch(NamedTuple):
    """Sequences of (queries, keys), and the configuration."""

    lengths: list[tuple[int, int]]
    heads: int = 128
    ctas: int = 132
    least: int = 2
    slack: int = 4


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    out = tmp_path_factory.mktemp("mla_sm90_work") / "mla_sm90_work.so"
    flags = ["-O1", "-fno-strict-aliasing", "-fno-extern-tls-init", "-fno-gnu-unique"]
    return compiled_library.load(out, ROOT / "tests/native/mla_sm90_work_fibers.cpp", flags=flags)


def scheduled(library: ctypes.CDLL, batch: Batch) -> list[Work]:
    """In the order of tickets; checked."""
    start = [0, *accumulate(queries for queries, _ in batch.lengths)]
    query_start, seq_lens = (
        torch.tensor(values, dtype=torch.int32) for values in (start, [keys for _, keys in batch.lengths])
    )
    work, count = torch.zeros(MOST, len(Work._fields), dtype=torch.int32), ctypes.c_int()
    ranges = library.schedule_on_cpu(
        *(ctypes.c_void_p(t.data_ptr()) for t in (query_start, seq_lens)),
        len(batch.lengths), *batch[1:], ctypes.c_void_p(work.data_ptr()), MOST, ctypes.byref(count),
    )  # fmt: skip
    assert 0 <= ranges <= batch.ctas and count.value < MOST
    works = [Work(*row) for row in work[: count.value].tolist()]
    check(batch, start, works)
    return works


def check(batch: Batch, start: list[int], works: list[Work]) -> None:
    tasks = defaultdict(list)
    for work in works:
        tasks[work.seq, work.row0].append(work)
    assert tasks.keys() == {
        (seq, row0)
        for seq, (queries, _) in enumerate(batch.lengths)
        for row0 in range(0, queries * batch.heads, ROWS)
    }
    for (seq, row0), parts in tasks.items():
        queries, keys = batch.lengths[seq]
        rows = min(ROWS, queries * batch.heads - row0)
        end = max(0, keys - queries + (row0 + rows - 1) // batch.heads + 1)
        assert {work[2:7] for work in parts} == {(1, start[seq], row0, rows, keys - queries)}
        assert {work.end for work in parts} == {end}
        tiles = [tile for work in parts for tile in range(work.first, work.first + work.tiles)]
        assert sorted(tiles) == list(range(cdiv(end, KEYS))), (seq, row0)
        parts.sort(key=lambda work: work.part)
        assert [work.part for work in parts] == list(range(len(parts)))
        assert {work.parts for work in parts} == {len(parts)} and len(
            {work.first_range for work in parts}
        ) == 1
        assert all(one.first <= other.first for one, other in zip(parts, parts[1:], strict=False))
        # As part_row of _mla_merge_sm90.cuh finds them.
        places = [(work.first_range + part) * 2 + (part == 0) for part, work in enumerate(parts)]
        assert [work.slot for work in parts] == (places if len(parts) > 1 else [-1])
        assert batch.slack >= 0 or len(parts) == 1
    slots = [work.slot for work in works if work.parts > 1]
    assert len(slots) == len({*slots}) and all(slot < 2 * batch.ctas for slot in slots)
    # Arrivals are counted at the first range of a task.
    counters = [work.first_range for work in works if work.parts > 1 and work.part == 0]
    assert len(counters) == len({*counters})


BATCHES = (
    Batch([(1, 5000), (1, 300)]),
    Batch([(1, 9000)] * 7 + [(1, 30), (0, 0), (1, 1)]),
    Batch([(4, 3000), (4, 7000), (0, 9), (4, 4)]),
    Batch([(1, 700 * i) for i in range(40)]),
    Batch([(1, 4000), (2, 4000), (1, 900)]),
    Batch([(1, 20000), (1, 64), (1, 65), (1, 0)], ctas=17),
    Batch([(1, 20000), (1, 64)], ctas=16, least=1, slack=0),
    Batch([(2, 5000), (2, 70)], heads=72, ctas=33, least=1, slack=0),
    Batch([(1, 5000), (1, 300), (1, 12)], heads=16, least=1),
    Batch([(70, 700), (3, 900), (1, 8000)], heads=20, ctas=24),
    Batch([(0, 0), (0, 5)]),
)


@pytest.mark.parametrize("slack", [None, -1, 0], ids=str)
@pytest.mark.parametrize("number", range(len(BATCHES)))
def test_schedules(library: ctypes.CDLL, number: int, slack: int | None) -> None:
    batch = BATCHES[number]
    scheduled(library, batch if slack is None else batch._replace(slack=slack))


def test_random_schedules(library: ctypes.CDLL) -> None:
    draw = random.Random(1)
    for _ in range(60):
        queries = draw.choice((1, 1, 2, 4))
        lengths = [
            (queries if draw.random() < 0.9 else draw.randrange(3), int(10 ** draw.uniform(0, 4.5)))
            for _ in range(draw.choice((1, 2, 5, 33, 70)))
        ]
        lengths = [(some, max(some, keys)) for some, keys in lengths]
        heads, ctas = draw.choice((16, 64, 72, 128)), draw.choice((8, 17, 33, 64, 132))
        scheduled(library, Batch(lengths, heads, ctas, draw.choice((1, 2, 4)), draw.choice((0, 4, 16))))


def test_tasks_of_a_sequence_read_their_keys_together(library: ctypes.CDLL) -> None:
    """The tickets of a range are neighbours, and have the same tiles, where all sequences have the same few tasks."""
    for queries, tasks in ((1, 2), (2, 4), (4, 8)):
        works = scheduled(library, Batch([(queries, 9000), (queries, 500), (0, 0), (queries, 3000)]))
        keys = defaultdict(list)
        for work in works:
            keys[work.ticket].append((work.seq, work.first))
        assert len(keys) == 132 // tasks * tasks
        assert all(keys[ticket] == keys[ticket // tasks * tasks] for ticket in keys)
        assert all(
            {work.row0 // ROWS for work in works if work.ticket % tasks == lane} == {lane}
            for lane in range(tasks)
        )
