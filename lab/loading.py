"""Load times of quantized checkpoints, next to reading the same bytes with safetensors.

    python -m lab.loading --gigabytes 2 --out bench/results/cpu/loading_2gb.json

A synthetic model of the given size is written in each format (`loading_cases`). The yardstick reads every tensor into memory with
safetensors: `safe_open`, `get_tensor`, `clone` (get_tensor returns a mapping of the file, which reads nothing until it is used).
The *reader* of the format returns every weight as a QuantTensor, checked and in memory of its own. The *loader* returns every
parameter as the runtime uses it, with the parts of fused matrices joined. *packed* is the loader plus the layout ``plain_v1``,
which kernels of every device read and which shares the parameters' memory. All results are kept until the end of a run. Each run is
a separate process, so that none uses memory that another has warmed. Runs are interleaved, and the first of each does not count.

Warm: the files are in the page cache. Cold: they are dropped from it before every run, and the bytes read from the disk are in the
result. The column ``step`` is the conversion from file to kernel: ``as it lies`` is a pass-through format, whose codes are copied
unchanged; words are transposed if a format stores columns instead of rows; the others are repacked. Layouts of particular kernels
(``cpu_rows16_v1``, ``w4_frag16_v1``) are packed later, on the device.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch

from gristmill import console
from gristmill.autotune.environment import environment
from gristmill.autotune.place import place
from lab.loading_cases import CASES, Made, synthesize
from lab.loading_turns import CALLS, turn
from lab.result import write_result


def drop(folder: Path) -> None:
    """Drop the files from the page cache."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


Turn = Callable[[str, Made], dict[str, float]]


@contextmanager
def processes() -> Iterator[Turn]:
    """A pool that runs each turn in a new process, forked from one that has only imported everything."""
    servers = multiprocessing.get_context("forkserver")
    servers.set_forkserver_preload(["lab.loading_turns"])
    with servers.Pool(1, maxtasksperchild=1) as pool:
        yield lambda reader, made: pool.apply(turn, (reader, made))


def measure(
    name: str, folder: Path, size: int, rounds: int, states: Sequence[str] = ("warm",), run_turn: Turn = turn
) -> list[dict[str, Any]]:
    """One case, a row for each state of the cache, ``warm`` or ``cold``; its files are written to an empty folder.

    take: runs a turn; by default in this process.
    """
    case = CASES[name]()
    made = synthesize(case, folder, size)
    about = {
        "case": name,
        "step": case.step,
        "bytes": sum(f.stat().st_size for f in folder.glob("*.safetensors")),
    }
    return [{**about, "cache": state, **_rounds(made, rounds, state == "cold", run_turn)} for state in states]


def _rounds(made: Made, rounds: int, cold: bool, run_turn: Turn) -> dict[str, Any]:
    """Samples of all readers, and their ratios to safetensors by minimum and by median."""
    samples: dict[str, list[dict[str, float]]] = {reader: [] for reader in CALLS}
    for number in range(rounds + 1):
        for reader in sorted(CALLS, reverse=number % 2 == 0):
            if cold:
                drop(made.folder)
            sample = run_turn(reader, made)
            if number:
                samples[reader].append(sample)
    row: dict[str, Any] = {}
    for clock in ("wall", "cpu"):
        for how in (min, statistics.median):
            seconds = {reader: how([s[clock] for s in taken]) for reader, taken in samples.items()}
            row[f"safetensors_{clock}_{how.__name__}"] = seconds["safetensors"]
            for reader in CALLS:
                if reader != "safetensors":
                    row[f"{reader}_{clock}_{how.__name__}"] = seconds[reader] / seconds["safetensors"]
    return {**row, "samples": samples}


COLUMNS = ("case", "step", "cache", "GB", "safetensors GB/s", "reader", "loader", "least", "CPU", "packed")
"""Columns of the table. `least` and `CPU` are of the loader: the shortest runs, and processor time. All others are medians."""
RATIOS = (
    "reader_wall_median",
    "loader_wall_median",
    "loader_wall_min",
    "loader_cpu_median",
    "packed_wall_median",
)


def cells(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The table's rows."""
    return [
        [
            r["case"],
            r["step"],
            r["cache"],
            f"{r['bytes'] / 1e9:.2f}",
            f"{r['bytes'] / r['safetensors_wall_median'] / 1e9:.2f}",
            *(f"{r[key]:.2f}" for key in RATIOS),
        ]
        for r in rows
    ]


@click.command()
@click.option("--gigabytes", type=float, default=2.0, show_default=True, help="Of a checkpoint.")
@click.option(
    "--rounds", type=click.IntRange(1), default=7, show_default=True, help="Turns that count, of each."
)
@click.option("--case", "only", metavar="TEXT", default="", help="Only cases whose name contains this text.")
@click.option(
    "--cold/--warm-only", default=True, show_default=True, help="Also with the files out of the page cache."
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder for models. Default: the system's temporary folder.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Write a result file.")
def main(gigabytes: float, rounds: int, only: str, cold: bool, folder: Path | None, out: Path | None) -> None:
    """Time the loading of quantized checkpoints next to safetensors."""
    names = [name for name in CASES if only in name]
    if not names:
        raise click.UsageError(f"no case contains {only!r}; known: {', '.join(CASES)}")
    rows: list[dict[str, Any]] = []
    for name in names:
        made = Path(tempfile.mkdtemp(dir=folder))
        try:
            with processes() as run_turn:
                rows += measure(
                    name,
                    made,
                    int(gigabytes * 1e9),
                    rounds,
                    ("warm", "cold") if cold else ("warm",),
                    run_turn,
                )
        finally:
            shutil.rmtree(made)
        click.echo(f"{name}: {rows[-1]['loader_wall_median']:.2f}", err=True)
        if out:  # after every case, so that an interrupted run keeps its results
            command = f"python -m lab.loading --gigabytes {gigabytes:g} --rounds {rounds}"
            out.parent.mkdir(parents=True, exist_ok=True)
            write_result(out, {"about": environment(place("cpu").target, command), "rows": rows})
    console.table(
        f"Loading, as a multiple of safetensors' time, {torch.get_num_threads()} thread(s)",
        COLUMNS,
        cells(rows),
        right=COLUMNS[3:],
    )


if __name__ == "__main__":
    main()
