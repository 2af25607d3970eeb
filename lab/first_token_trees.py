"""Time from the start of a process to the first token, warmed up, of several source trees in turn, with an empty and with a filled store.

    python -m lab.first_token_trees --tree before=/tmp/2ce7023 --tree now=. --model qwen3-0.6b --rounds 3 --out first_token.json
    python -m lab.first_token_trees ... --model llama3-8b --checkpoint int4_g128 --distinct 2

A tree is a checkout with its libraries in src/gristmill/_lib. Every start is a new process. In each round every tree starts twice: over empty
caches, of records and of compiled Triton kernels, and then over what that start has left. A start of each tree before the first round puts
files into the page cache and writes compiled bytecode, as an installation has it, and does not count. A tree whose engines do not warm up when
they are loaded does so by `Engine.warm_up`. Medians are compared with the first tree's.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch

from gristmill import console
from gristmill.autotune.environment import environment
from gristmill.autotune.place import place
from lab.engine import SHAPES
from lab.engine_turns import made
from lab.first_token import child_environment
from lab.result import write_result

CHILD = """
import json, sys, time
began, model, options = float(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
# An editable installation would be found before the tree.
sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "ScikitBuildRedirectingFinder"]
import torch
torch_at = time.time()
from gristmill import LLM, SamplingParams
imported = time.time()
llm = LLM(model, **options)
if getattr(llm.engine, "warmed", None) is None:
    llm.engine.warm_up()
if torch.cuda.is_available():
    torch.cuda.synchronize()
warm = time.time()
llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
end = time.time()
report = getattr(llm.engine, "warmed", None)
import gristmill
print(json.dumps({
    "tree": gristmill.__file__, "torch": torch_at - began, "gristmill": imported - torch_at, "load and warm-up": warm - imported,
    "first token": end - warm, "total": end - began, "phases": report.seconds if report else {},
}))
"""
STORES = ("empty", "filled")
PHASES = ("torch", "gristmill", "load and warm-up", "first token", "total")


def start(tree: Path, model: Path, caches: Path, bytecode: Path, options: dict[str, Any]) -> dict[str, Any]:
    """A start of a tree over the caches of a folder, with compiled bytecode in another: seconds by phase."""
    env = child_environment(bytecode) | {
        "PYTHONPATH": str(tree / "src"),
        "XDG_CACHE_HOME": str(caches),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }
    command = [sys.executable, "-c", CHILD, repr(time.time()), str(model.absolute()), json.dumps(options)]
    done = subprocess.run(command, env=env, cwd=tree, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if not Path(row["tree"]).resolve().is_relative_to((tree / "src").resolve()):
        raise click.ClickException(f"{tree}: the process imported {row['tree']} instead")
    return row


def measure(
    trees: dict[str, Path], model: Path, rounds: int, bytecode: Path, options: dict[str, Any]
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Tree -> store, empty or filled -> its starts."""
    starts: dict[str, dict[str, list[dict[str, Any]]]] = {
        name: {store: [] for store in STORES} for name in trees
    }
    for count in range(-1, rounds):
        for name, tree in trees.items():
            with tempfile.TemporaryDirectory() as caches:
                for store in STORES[: 1 if count < 0 else 2]:
                    row = start(tree, model, Path(caches), bytecode, options)
                    if count >= 0:
                        starts[name][store].append(row)
                        seconds = {phase: round(row[phase], 2) for phase in PHASES}
                        print(json.dumps({"tree": name, "store": store, **seconds}), flush=True)
    return starts


def summary(starts: dict[str, dict[str, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """A row for each tree and store: medians, and the total as a part of the first tree's."""
    rows = []
    for name, stores in starts.items():
        for store, samples in stores.items():
            medians = {phase: statistics.median(sample[phase] for sample in samples) for phase in PHASES}
            phases = {
                phase: statistics.median(sample["phases"].get(phase, 0.0) for sample in samples)
                for phase in samples[0]["phases"]
            }
            first = statistics.median(sample["total"] for sample in next(iter(starts.values()))[store])
            rows.append(
                {"tree": name, "store": store, **medians, "part": medians["total"] / first, "phases": phases}
            )
    return rows


@click.command()
@click.option(
    "--tree", "given", multiple=True, required=True, metavar="NAME=PATH", help="The first is the baseline."
)
@click.option("--model", required=True, help=f"A directory, a GGUF file, or one of {', '.join(SHAPES)}.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--quant", help="As of gristmill generate.")
@click.option(
    "--checkpoint", help="Number format in which a model that is made is stored: compressed-tensors."
)
@click.option("--distinct", type=click.IntRange(1), help="Its layers that are no copies. Default: all.")
@click.option("--limits", default="{}", help="JSON of further arguments of LLM, which all trees take.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Write a result file.")
def main(
    given: tuple[str, ...],
    model: str,
    device: str,
    quant: str | None,
    checkpoint: str | None,
    distinct: int | None,
    limits: str,
    rounds: int,
    out: Path | None,
) -> None:
    """Time from process start to the first token of several source trees."""
    trees = {name: Path(path).absolute() for name, _, path in (text.partition("=") for text in given)}
    for name, tree in trees.items():
        if not (tree / "src" / "gristmill").is_dir():
            raise click.UsageError(f"--tree {name}: {tree} has no src/gristmill")
    options = {"device": device, "quant": quant, **json.loads(limits)}
    with tempfile.TemporaryDirectory() as scratch:
        path = made(model, Path(scratch), checkpoint, distinct=distinct)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        starts = measure(trees, path, rounds, Path(scratch) / "bytecode", options)
    rows = summary(starts)
    if out is not None:
        stored = "".join(
            f" --{name} {value}"
            for name, value in (("checkpoint", checkpoint), ("distinct", distinct))
            if value
        )
        command = (
            f"python -m lab.first_token_trees --model {model}{stored} --rounds {rounds} --limits '{limits}'"
        )
        about = environment(place("cpu" if device == "cpu" else None).target, command)
        out.parent.mkdir(parents=True, exist_ok=True)
        write_result(out, {"about": about, "options": options, "rows": rows, "starts": starts})
    columns = ("tree", "store", *PHASES, "part")
    console.table(
        f"Seconds to the first token of {model}, medians of {rounds}",
        columns,
        [[row["tree"], row["store"], *(f"{row[name]:.2f}" for name in columns[2:])] for row in rows],
        right=columns[2:],
    )


if __name__ == "__main__":
    main()
