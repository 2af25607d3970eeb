"""How long quantized checkpoints take to load, next to reading the same bytes with safetensors.

    python -m gristmill.bench.loading --gigabytes 2 --out bench/results/cpu/loading.json

A synthetic model of the shapes of Llama-3-8B, as many layers as make the size, is written in each format. The yardstick is
safetensors' own way to have every tensor in memory: `safe_open`, `get_tensor`, `clone` (a tensor it gives is the file's mapping,
which reads nothing until it is used). Beside it the format's reader gives every weight as a QuantTensor, checked and in memory of
its own; and the loader every parameter as the runtime gets it, parts of fused matrices joined besides. All keep what they have
until they are done, and the memory goes back to the system then: whoever loads a model begins without it. They take turns, and
the first turn of each is not counted.

Warm, the files are in the page cache; cold, they are dropped from it before every turn, and the bytes that the disk really gave
are in the result. Pass-through formats are those whose codes lie in the file as a QuantTensor holds them, bit for bit or rows for
columns; AWQ's are rearranged inside words, and are here for information.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from gristmill import console
from gristmill.autotune.environment import environment
from gristmill.bench.place import place
from gristmill.quant.formats import open_format
from gristmill.quant.formats.contract import owned
from gristmill.quant.formats.writers import open_writer
from gristmill.runtime.loader.checkpoint import INDEX, Checkpoint
from gristmill.runtime.loader.weights import Weight, Weights, WeightTable

HIDDEN, KV, FFN = 4096, 1024, 14336
FUSED = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
SHAPES = {
    "q": (HIDDEN, HIDDEN), "k": (KV, HIDDEN), "v": (KV, HIDDEN), "o": (HIDDEN, HIDDEN),
    "gate": (FFN, HIDDEN), "up": (FFN, HIDDEN), "down": (HIDDEN, FFN),
}  # fmt: skip
"""Linear weights of a layer, [N, K]."""


@dataclass(frozen=True)
class Case:
    """A format in a scheme. tensors: (rows, columns, generator) -> suffix -> what is stored of a matrix."""

    tensors: Callable[[int, int, torch.Generator], dict[str, Tensor]]
    config: Mapping[str, Any]
    pass_through: bool = True


def written(form: str, scheme: str) -> Case:
    """A case by the format's writer."""
    writer = open_writer(form, scheme)

    def tensors(n: int, k: int, generator: torch.Generator) -> dict[str, Tensor]:
        return writer.tensors(writer.quantize(torch.randn(n, k, generator=generator) * 0.02))

    return Case(tensors, writer.config([]))


def awq() -> Case:
    """AWQ in groups of 128, from the format's facts: nobody here writes it."""

    def tensors(n: int, k: int, generator: torch.Generator) -> dict[str, Tensor]:
        def words(rows: int) -> Tensor:
            return torch.randint(-(1 << 31), 1 << 31, (rows, n // 8), generator=generator).to(torch.int32)

        scales = torch.rand(k // 128, n, generator=generator).half()
        return {"qweight": words(k), "qzeros": words(k // 128), "scales": scales}

    return Case(tensors, {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, pass_through=False)


CASES: Mapping[str, Callable[[], Case]] = {
    "fp8 fp8_block": lambda: written("fp8", "fp8_block"),
    "gptq int4_g128": lambda: written("gptq", "int4_g128"),
    "modelopt nvfp4": lambda: written("modelopt", "nvfp4"),
    "compressed-tensors int4_g128": lambda: written("compressed-tensors", "int4_g128"),
    "compressed-tensors int8_ch": lambda: written("compressed-tensors", "int8_ch.int8_token"),
    "modelopt mxfp4": lambda: written("modelopt", "mxfp4"),
    "modelopt mxfp8": lambda: written("modelopt", "mxfp8"),
    "gristmill int4_g128_zp": lambda: written("gristmill", "int4_g128_zp"),
    "awq int4_g128_zp": awq,
}


def synthesize(case: Case, folder: Path, size: int) -> WeightTable:
    """Write layers, a file each, until they have `size` bytes; every layer holds the same numbers. Returns the table."""
    generator = torch.Generator().manual_seed(0)
    made = {shape: case.tensors(*shape, generator) for shape in dict.fromkeys(SHAPES.values())}
    layer = {f"{name}.{suffix}": t.clone() for name, shape in SHAPES.items() for suffix, t in made[shape].items()}
    bytes_of_one = sum(t.numel() * t.element_size() for t in layer.values())
    weights, index = [], {}
    for number in range(max(1, round(size / bytes_of_one))):
        file, prefix = f"model-{number:05d}.safetensors", f"layers.{number}."
        save_file({prefix + name: t.contiguous() for name, t in layer.items()}, folder / file)
        index.update({prefix + name: file for name in layer})
        for target, parts in FUSED.items():
            sources = tuple(prefix + part for part in parts)
            weights.append(Weight(prefix + target, sources, tuple(SHAPES[p][0] for p in parts), SHAPES[parts[0]][1], "linear"))
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    return WeightTable(tuple(weights))


def copied(folder: Path) -> list[Tensor]:
    """The yardstick: every tensor in memory, by safetensors."""
    held = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as source:
            held += [source.get_tensor(name).clone() for name in source.keys()]  # noqa: SIM118
    return held


def loaded(folder: Path, table: WeightTable, config: Mapping[str, Any]) -> list[Any]:
    """Every parameter by the runtime's loader."""
    weights = Weights(Checkpoint(folder), table, torch.bfloat16, torch.device("cpu"), None, open_format(config))
    held = [weights.parts(weight.target) for weight in table.weights]
    weights.finish()
    return held


def readers(folder: Path, table: WeightTable, config: Mapping[str, Any]) -> list[Any]:
    """Every weight by its format's reader."""
    checkpoint, form = Checkpoint(folder), open_format(config)
    held = []
    for weight in table.weights:
        for name, rows in zip(weight.sources, weight.rows, strict=True):
            found = form.read(checkpoint, name, (rows, weight.columns or 1))
            assert found is not None
            held.append(owned(found.weight))
    return held


def drop(folder: Path) -> None:
    """Take the files out of the page cache."""
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def read_bytes() -> int:
    """Bytes that this process has had from disks; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/io").read_text().split("read_bytes:")[1].split()[0])
    except (OSError, IndexError):
        return 0


def turn(call: Callable[[], object]) -> dict[str, float]:
    """Seconds of one call, by the clock and of the processor, and what the disk gave. Its result lives until it ends."""
    before, wall, cpu = read_bytes(), time.perf_counter(), time.process_time()
    held = call()
    found = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "disk": float(read_bytes() - before)}
    del held
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc
    if trim is not None:
        trim(0)
    return found


def measure(name: str, folder: Path, size: int, rounds: int, states: Sequence[str] = ("warm",)) -> list[dict[str, Any]]:
    """One case, a row for each state of the cache, ``warm`` or ``cold``; its files are written to an empty folder."""
    case = CASES[name]()
    table = synthesize(case, folder, size)
    about = {"case": name, "pass_through": case.pass_through, "bytes": sum(f.stat().st_size for f in folder.glob("*.safetensors"))}
    return [{**about, "cache": state, **_rounds(case, table, folder, rounds, state == "cold")} for state in states]


def _rounds(case: Case, table: WeightTable, folder: Path, rounds: int, cold: bool) -> dict[str, Any]:
    """Samples of all three, and their ratios to safetensors by least and by median samples."""
    calls: dict[str, Callable[[], object]] = {
        "safetensors": lambda: copied(folder),
        "reader": lambda: readers(folder, table, case.config),
        "loader": lambda: loaded(folder, table, case.config),
    }
    samples: dict[str, list[dict[str, float]]] = {who: [] for who in calls}
    for number in range(rounds + 1):
        for who in sorted(calls, reverse=number % 2 == 0):
            if cold:
                drop(folder)
            sample = turn(calls[who])
            if number:
                samples[who].append(sample)
    row: dict[str, Any] = {}
    for clock in ("wall", "cpu"):
        for how in (min, statistics.median):
            seconds = {who: how([s[clock] for s in taken]) for who, taken in samples.items()}
            row[f"safetensors_{clock}_{how.__name__}"] = seconds["safetensors"]
            for who in ("reader", "loader"):
                row[f"{who}_{clock}_{how.__name__}"] = seconds[who] / seconds["safetensors"]
    return {**row, "samples": samples}


@click.command()
@click.option("--gigabytes", type=float, default=2.0, show_default=True, help="Of a checkpoint.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Turns that count, of each.")
@click.option("--case", "only", metavar="TEXT", default="", help="Only cases whose name contains this.")
@click.option("--cold/--warm-only", default=True, show_default=True, help="Also with the files out of the page cache.")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="Where to write; default: the system's temporary folder.")
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
            rows += measure(name, made, int(gigabytes * 1e9), rounds, ("warm", "cold") if cold else ("warm",))
        finally:
            shutil.rmtree(made)
        click.echo(f"{name}: {rows[-1]['reader_wall_median']:.2f}", err=True)
        if out:  # after every case: what was measured is not lost with what was not
            command = f"python -m gristmill.bench.loading --gigabytes {gigabytes:g} --rounds {rounds}"
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps({"about": environment(place("cpu").target, command), "rows": rows}) + "\n")
    figures = ("GB", "safetensors GB/s", "reader", "least", "CPU", "loader", "least", "CPU")
    ratios = [f"{who}_{which}" for who in ("reader", "loader") for which in ("wall_median", "wall_min", "cpu_median")]
    console.table(
        f"Loading, as a multiple of safetensors' time, {torch.get_num_threads()} thread(s)", ["case", "cache", *figures],
        [[r["case"] + ("" if r["pass_through"] else " (rearranged)"), r["cache"], f"{r['bytes'] / 1e9:.2f}",
          f"{r['bytes'] / r['safetensors_wall_median'] / 1e9:.2f}",
          *(f"{r[key]:.2f}" for key in ratios)] for r in rows],
        right=figures,
    )  # fmt: skip


if __name__ == "__main__":
    main()
