"""Time from the start of a process to the first token of a model, by phases, beside the time of `import torch` alone.

    python -m lab.first_token --rounds 5 --out first_token.json

The models are GGUF files of random weights (`lab.gguf_model`). Every run is a new process with a warm store and a warm page cache,
of compiled bytecode as an installation has; the first of each model does not count. Phases: ``start`` of the interpreter; ``torch``
and ``gristmill``, their imports; ``header`` and ``tokenizer``; ``plans``, the resolution of kernels; ``packing`` in the layouts of
kernels; ``weights``, the rest of loading; ``step``, which ends with the first token. ``command`` is `gristmill generate` with one
token, as a user runs it, from its start to its end.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from gristmill import console
from gristmill.autotune.environment import environment
from gristmill.autotune.place import place
from lab import gguf_model
from lab.result import write_result

PHASES = ("start", "torch", "gristmill", "header", "tokenizer", "plans", "packing", "weights", "step")
CASES: dict[str, tuple[str, str | None, int]] = {"Q4_0": ("Q4_0", "BF16", 28), "BF16": ("BF16", None, 20)}
"""Name -> ggml's type of the matrices, that of the embedding if it is another, and layers."""
CHILD = "from lab.first_token_child import main; main()"
PROMPT = "hello there"


def child_environment(cache: Path) -> dict[str, str]:
    """The environment of a run: bytecode is written and read."""
    others = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return others | {"PYTHONPYCACHEPREFIX": str(cache)}


def run(model: Path, env: dict[str, str], options: tuple[str, ...]) -> dict[str, float]:
    """One sample: seconds of the phases, their sum ``total``, ``command``, and ``peak_mb`` and ``weights_mb``."""
    begin = time.clock_gettime(time.CLOCK_MONOTONIC)
    child = [sys.executable, "-c", CHILD, str(model), repr(begin), *options]
    text = subprocess.run(child, env=env, capture_output=True, text=True, check=True).stdout
    sample: dict[str, float] = json.loads(text.splitlines()[-1])
    command = [sys.executable, "-m", "gristmill.tools.cli", "generate", "--model", str(model)]
    command += ["--prompt", PROMPT, "--max-tokens", "1", "--json", *options]
    begin = time.perf_counter()
    subprocess.run(command, env=env, capture_output=True, check=True)
    return sample | {"command": time.perf_counter() - begin}


def measure(model: Path, rounds: int, cache: Path, options: tuple[str, ...] = ()) -> dict[str, Any]:
    """A row: medians, and the samples; `options` are those of `gristmill generate`."""
    env = child_environment(cache)
    samples = [run(model, env, options) for _ in range(rounds + 1)][1:]
    medians = {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}
    return {
        "model": model.name,
        "options": " ".join(options),
        "bytes": model.stat().st_size,
        **medians,
        "samples": samples,
    }


@click.command()
@click.option("--case", "only", metavar="TEXT", default="", help="Only cases whose name contains this text.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Samples of each model.")
@click.option("--quant-head", metavar="SCHEME", help="As of gristmill generate.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="The folder for models; those that are there are used. Default: a temporary one.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Write a result file.")
def main(only: str, rounds: int, quant_head: str | None, folder: Path | None, out: Path | None) -> None:
    """Time from process start to the first token of GGUF files."""
    cases = {name: case for name, case in CASES.items() if only in name}
    if not cases:
        raise click.UsageError(f"no case contains {only!r}; known: {', '.join(CASES)}")
    options = () if quant_head is None else ("--quant-head", quant_head)
    rows: list[dict[str, Any]] = []
    command = f"python -m lab.first_token --rounds {rounds} {' '.join(options)}".strip()
    with tempfile.TemporaryDirectory() as temporary:
        for name, (kind, embedding, layers) in cases.items():
            model = (folder or Path(temporary)) / f"{name}.gguf"
            if not model.exists():
                gguf_model.write_model(
                    model, kind, layers, embedding, gguf_model.VOCABULARY, gguf_model.MERGES
                )
            rows.append(measure(model, rounds, Path(temporary) / "bytecode", options))
            if out is not None:  # after every case, so that an interrupted run keeps its results
                about = environment(place("cpu").target, command)
                out.parent.mkdir(parents=True, exist_ok=True)
                write_result(out, {"about": about, "rows": rows})
    columns = ("model", "MB", *PHASES, "total", "less torch", "command", "peak MB", "weights MB")
    console.table(
        "Seconds to the first token, medians",
        columns,
        [
            [
                row["model"],
                f"{row['bytes'] / 1e6:.0f}",
                *(f"{row[phase]:.2f}" for phase in (*PHASES, "total")),
                f"{row['total'] - row['torch'] - row['start']:.2f}",
                f"{row['command']:.2f}",
                f"{row['peak_mb']:.0f}",
                f"{row['weights_mb']:.0f}",
            ]
            for row in rows
        ],
        right=columns[1:],
    )


if __name__ == "__main__":
    main()
