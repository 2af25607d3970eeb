"""How long quantized checkpoints take to load, next to reading the same bytes with safetensors.

    python -m lab.loading --gigabytes 2 --out bench/results/cpu/loading_2gb.json

A synthetic model is written in each format (`loading_cases`), as many layers as make the size. The yardstick is safetensors'
own way to have every tensor in memory: `safe_open`, `get_tensor`, `clone` (a tensor it gives is the file's mapping, which reads
nothing until it is used). Beside it the format's reader gives every weight as a QuantTensor, checked and in memory of its own;
the loader every parameter as the runtime gets it, parts of fused matrices joined besides; and ``packed`` is the loader and then the
layout ``plain_v1``, which kernels of every device read and which shares the parameters' memory. All keep what they have until they
are done. Each turn is a process of its own, as loading a model is, so that none finds memory that another has warmed. They
take turns, and the first turn of each is not counted.

Warm, the files are in the page cache; cold, they are dropped from it before every turn, and the bytes that the disk really gave
are in the result. The column ``step`` says what lies between file and kernel: ``as it lies`` is a pass-through format, whose codes are
copied and not touched; words are transposed where a format stores columns for rows; the others are repacked, and are here for
information. Layouts that one kind of kernel wants (``cpu_rows16_v1``, ``w4_frag16_v1``) are packed after this, on the device.
"""

from __future__ import annotations

import json
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


def drop(folder: Path) -> None:
    """Take the files out of the page cache."""
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
    """A turn in a process of its own, forked from one that has imported everything and done nothing."""
    servers = multiprocessing.get_context("forkserver")
    servers.set_forkserver_preload(["lab.loading_turns"])
    with servers.Pool(1, maxtasksperchild=1) as pool:
        yield lambda who, made: pool.apply(turn, (who, made))


def measure(
    name: str, folder: Path, size: int, rounds: int, states: Sequence[str] = ("warm",), take: Turn = turn
) -> list[dict[str, Any]]:
    """One case, a row for each state of the cache, ``warm`` or ``cold``; its files are written to an empty folder.

    take: who takes a turn where; by default this process does.
    """
    case = CASES[name]()
    made = synthesize(case, folder, size)
    about = {
        "case": name,
        "step": case.step,
        "bytes": sum(f.stat().st_size for f in folder.glob("*.safetensors")),
    }
    return [{**about, "cache": state, **_rounds(made, rounds, state == "cold", take)} for state in states]


def _rounds(made: Made, rounds: int, cold: bool, take: Turn) -> dict[str, Any]:
    """Samples of all, and their ratios to safetensors by least and by median samples."""
    samples: dict[str, list[dict[str, float]]] = {who: [] for who in CALLS}
    for number in range(rounds + 1):
        for who in sorted(CALLS, reverse=number % 2 == 0):
            if cold:
                drop(made.folder)
            sample = take(who, made)
            if number:
                samples[who].append(sample)
    row: dict[str, Any] = {}
    for clock in ("wall", "cpu"):
        for how in (min, statistics.median):
            seconds = {who: how([s[clock] for s in taken]) for who, taken in samples.items()}
            row[f"safetensors_{clock}_{how.__name__}"] = seconds["safetensors"]
            for who in CALLS:
                if who != "safetensors":
                    row[f"{who}_{clock}_{how.__name__}"] = seconds[who] / seconds["safetensors"]
    return {**row, "samples": samples}


COLUMNS = ("case", "step", "cache", "GB", "safetensors GB/s", "reader", "loader", "least", "CPU", "packed")
"""Of the table; `least` and `CPU` are the loader's, by the shortest turns and in processor time, all else by medians."""
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
@click.option("--case", "only", metavar="TEXT", default="", help="Only cases whose name contains this.")
@click.option(
    "--cold/--warm-only", default=True, show_default=True, help="Also with the files out of the page cache."
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where to write; default: the system's temporary folder.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Write the raw samples here as JSON.")
def main(gigabytes: float, rounds: int, only: str, cold: bool, folder: Path | None, out: Path | None) -> None:
    """Time the loading of quantized checkpoints next to safetensors."""
    names = [name for name in CASES if only in name]
    if not names:
        raise click.UsageError(f"no case contains {only!r}; known: {', '.join(CASES)}")
    rows: list[dict[str, Any]] = []
    for name in names:
        made = Path(tempfile.mkdtemp(dir=folder))
        try:
            with processes() as take:
                rows += measure(
                    name, made, int(gigabytes * 1e9), rounds, ("warm", "cold") if cold else ("warm",), take
                )
        finally:
            shutil.rmtree(made)
        click.echo(f"{name}: {rows[-1]['loader_wall_median']:.2f}", err=True)
        if out:  # after every case: what was measured is not lost with what was not
            command = f"python -m lab.loading --gigabytes {gigabytes:g} --rounds {rounds}"
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(
                json.dumps({"about": environment(place("cpu").target, command), "rows": rows}) + "\n"
            )
    console.table(
        f"Loading, as a multiple of safetensors' time, {torch.get_num_threads()} thread(s)",
        COLUMNS,
        cells(rows),
        right=COLUMNS[3:],
    )


if __name__ == "__main__":
    main()
