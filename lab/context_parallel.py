"""Long contexts with the cache spread over ranks: time of the prompt and of a decode step, beside tensor parallelism alone and one device.

    python -m lab.context_parallel --model gqa --model mla --contexts 8192,65536 --batch 4 --out context_parallel.json

``gqa`` has layers of Llama-3-8B, ``mla`` the attention of DeepSeek-V3 with small dense layers; both have 8 layers with random weights, in bfloat16.
A directory is another model. Layouts follow each other: ``one`` device, ``tensor`` parallelism over two ranks, and ``context`` parallelism in
addition. A prompt is computed anew in each round; a step is what another token costs the batch after it. ``cache_bytes`` is what the caches of
all ranks take for these contexts.
"""

from __future__ import annotations

import math
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click

from gristmill import LLM, SamplingParams, console
from gristmill.autotune.environment import environment
from gristmill.autotune.place import place
from gristmill.kernel_registry.scheme import cdiv
from gristmill.runtime.scheduler import RequestOutput, SchedulerConfig
from lab.engine import greedy, random_model
from lab.result import write_result

BLOCK = 16
WATERMARK = SchedulerConfig(num_blocks=1).watermark
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gqa": ("llama3-8b", {"num_hidden_layers": 8, "max_position_embeddings": 1 << 18}),
    "mla": ("deepseek-mla", {}),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tensor": {"tensor_parallel": 2},
    "context": {"tensor_parallel": 2, "context_parallel": True},
}


def blocks_for(contexts: Sequence[int], batch: int, tokens: int, size: int) -> int:
    """Blocks of `size` tokens with which all requests of the longest context run at the same time, each with so many tokens of output.

    The scheduler keeps a part of its blocks free when it admits a request. With too few for that, the last request would wait until the others
    have ended, and each step would be counted twice.
    """
    need = batch * (cdiv(max(contexts) + tokens + 2, size) + 1)
    return math.ceil(need / (1 - WATERMARK))


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> tuple[float, int]:
    """Seconds of a batch, all of it, and the number of its steps."""
    step, steps = llm.engine.step, 0

    def counted() -> list[RequestOutput]:
        nonlocal steps
        steps += 1
        return step()

    with patch.object(llm.engine, "step", counted):
        begin = time.perf_counter()
        llm.generate(prompts, params)
        return time.perf_counter() - begin, steps


def measure(llm: LLM, context: int, batch: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds of `batch` prompts of `context` tokens, and of a step after them."""
    draw = random.Random(0)
    top = min(10_000, llm.config.vocab_size - 1)
    prompts = [[draw.randint(0, top) for _ in range(context)] for _ in range(batch)]
    first, steps = list[float](), list[float]()
    for number in range(rounds + 1):  # the first one compiles
        llm.engine.reset_prefix_cache()
        computed, _ = run(llm, prompts, greedy(1))
        one, many = (run(llm, prompts, greedy(count)) for count in (1, 1 + tokens))  # of cached prompts
        if many[1] - one[1] != tokens:
            raise RuntimeError(
                f"{tokens} more tokens of each request took {many[1] - one[1]} steps: they did not run at the same time"
            )
        if number:
            first.append(computed)
            steps.append((many[0] - one[0]) / tokens)
    return {
        "prompts_s": statistics.median(first),
        "step_s": statistics.median(steps),
        "prompts_samples_s": first,
        "step_samples_s": steps,
    }


def rows_of(
    name: str,
    folder: Path,
    layout: str,
    contexts: list[int],
    batch: int,
    tokens: int,
    rounds: int,
    device: str,
) -> Iterator[dict[str, Any]]:
    """A row of a layout for each context, as soon as it is measured."""
    options = LAYOUTS[layout]
    size = BLOCK * (2 if "context_parallel" in options else 1)
    blocks = blocks_for(contexts, batch, tokens, size)
    llm = LLM(folder, device=device, num_blocks=blocks, max_seqs=batch, async_steps=False, **options)
    try:
        status = llm.engine.status()
        for context in contexts:
            row = measure(llm, context, batch, tokens, rounds)
            yield {
                "model": name,
                "layout": layout,
                "context": context,
                "batch": batch,
                "cache_bytes": status.cache_bytes,
                **row,
            }
    finally:
        llm.close()


@click.command()
@click.option(
    "--model", "models", multiple=True, default=("gqa", "mla"), show_default=True, help="Several times."
)
@click.option(
    "--layout", "layouts", multiple=True, type=click.Choice([*LAYOUTS]), help="Only this one. Several times."
)
@click.option(
    "--contexts", default="8192,65536", show_default=True, metavar="N,...", help="Tokens of prompts."
)
@click.option("--batch", type=click.IntRange(1), default=4, show_default=True)
@click.option("--tokens", type=click.IntRange(1), default=64, show_default=True, help="Steps that are timed.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--device", default="cuda", show_default=True, type=click.Choice(["cuda", "cpu"]))
@click.option("--out", type=click.Path(path_type=Path), help="Write the rows to this JSON file.")
def main(
    models: tuple[str, ...],
    layouts: tuple[str, ...],
    contexts: str,
    batch: int,
    tokens: int,
    rounds: int,
    device: str,
    out: Path | None,
) -> None:
    """Prompts and decode steps of long contexts over two ranks."""
    command = f"python -m lab.context_parallel --contexts {contexts} --batch {batch} --tokens {tokens} --rounds {rounds} --device {device}"
    command += "".join(f" --model {name}" for name in models) + "".join(
        f" --layout {name}" for name in layouts
    )
    rows: list[dict[str, Any]] = []
    lengths = [int(length) for length in contexts.split(",")]
    for name in models:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(name)
            if name in MODELS:
                shape, changes = MODELS[name]
                folder = random_model(shape, Path(scratch), **changes)
            for layout in layouts or LAYOUTS:
                for row in rows_of(name, folder, layout, lengths, batch, tokens, rounds, device):
                    rows.append(row)
                    print(
                        f"{name} {layout} {row['context']}: {row['prompts_s']:.2f} s, {row['step_s'] * 1e3:.2f} ms",
                        flush=True,
                    )
                    if out is not None:  # after each, so that an interrupted run keeps its results
                        about = environment(place(device).target, command)
                        write_result(out, {"about": about, "rows": rows})
    console.table(
        f"{batch} prompts at once",
        ["model", "layout", "context", "prompts, s", "step, ms", "caches, MB"],
        [
            [
                Path(row["model"]).name,
                row["layout"],
                row["context"],
                f"{row['prompts_s']:.2f}",
                f"{row['step_s'] * 1e3:.2f}",
                f"{row['cache_bytes'] / 1e6:.0f}",
            ]
            for row in rows
        ],
        right=("context", "prompts, s", "step, ms", "caches, MB"),
    )


if __name__ == "__main__":
    main()
