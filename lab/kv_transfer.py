"""Time to the first token of a prompt that was computed before: computed again, from the prefix cache, and from KV stores.

    python -m lab.kv_transfer --model llama-3-8b --device cuda --tokens 2048,8192 --store host:8GiB --store shm:lab:8GiB --out kv_transfer.json

The model has random weights. In each round every case runs once, in turn: ``computed``, with nothing cached; ``prefix cache``, whose blocks are
on the device; then each store, whose records are in its memory or in files that were just written. One request at a time, one token. ``saved_s`` is
the time from the first token of a prompt until its blocks are in a store; ``failures`` must be empty.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch

from gristmill import console
from gristmill.autotune.environment import environment
from gristmill.autotune.place import place
from gristmill.bench.decode import model_config
from gristmill.bench.shapes import load_config
from gristmill.runtime.engine import Engine
from gristmill.runtime.kv_cache.size import make_cache
from gristmill.runtime.kv_transfer.config import KVTransfer
from gristmill.runtime.models import Model
from gristmill.runtime.runner import Runner
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import SchedulerConfig
from gristmill.tools.random_model import random_model
from lab.result import write_result

BLOCK = 16


def make_engine(model: Model, tokens: int, store: str | None) -> Engine:
    """An engine for one prompt of `tokens` tokens."""
    blocks = tokens // BLOCK + 2
    runner = Runner(model, make_cache(model, blocks, BLOCK), decode_graphs=False, max_seqs=1)
    transfer = None if store is None else KVTransfer([store], save_after=1, timeout=60, identity="random")
    config = SchedulerConfig(blocks, BLOCK, max_batch_tokens=2048, max_seqs=1)
    return Engine.from_parts(runner, config, kv_transfer=transfer)


def first_token(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Seconds until the first token, and the token."""
    begin = time.perf_counter()
    engine.add_request("prompt", prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    while not (outputs := engine.step()):
        pass
    return time.perf_counter() - begin, int(outputs[0].new_ids[0])


def measure(model: Model, tokens: int, stores: list[str], rounds: int) -> list[dict[str, Any]]:
    """A row for each case. The prompt has one token more than blocks hold, which is always computed."""
    prompt = torch.randint(
        0, model.config.vocab_size, (tokens + 1,), generator=torch.Generator().manual_seed(0)
    )
    ids, samples, saved = prompt.tolist(), dict[str, list[float]](), dict[str, list[float]]()
    engines = {store: make_engine(model, tokens, store) for store in stores}
    plain = make_engine(model, tokens, None)
    expected = first_token(plain, ids)[1]
    for engine in engines.values():
        first_token(engine, ids)
        engine.flush_kv_transfer(120)

    def sample(name: str, engine: Engine) -> None:
        seconds, token = first_token(engine, ids)
        if token != expected:
            raise RuntimeError(f"{name}: token {token}, computed before: {expected}")
        samples.setdefault(name, []).append(seconds)

    for number in range(rounds):
        plain.reset_prefix_cache()
        sample("computed", plain)
        sample("prefix cache", plain)
        for store, engine in engines.items():
            engine.reset_prefix_cache()
            sample(store, engine)
            other = [(token + number + 1) % model.config.vocab_size for token in ids]  # nobody has had it
            engine.reset_prefix_cache()
            first_token(engine, other)
            begin = time.perf_counter()
            engine.flush_kv_transfer(120)
            saved.setdefault(store, []).append(time.perf_counter() - begin)
    rows = []
    for name, seconds in samples.items():
        status = engines[name].status().kv_transfer if name in engines else None
        rows.append(
            {
                "tokens": tokens,
                "case": name,
                "first_token_s": statistics.median(seconds),
                "bytes": 0 if status is None else status.loaded_bytes // rounds,
                "saved_s": statistics.median(saved[name]) if name in saved else None,
                "failures": {} if status is None else dict(status.failures),
                "samples_s": seconds,
                "saved_samples_s": saved.get(name, []),
            }
        )
    for engine in engines.values():
        engine.close()
    return rows


@click.command()
@click.option("--model", "name", default="llama-3-8b", show_default=True, help="As of kernelbench decode.")
@click.option("--layers", type=click.IntRange(1), help="Layers. Default: the model's.")
@click.option("--device", default="cpu", show_default=True, metavar="cpu|cuda")
@click.option("--tokens", default="2048", show_default=True, metavar="N,...", help="Lengths of prompts.")
@click.option("--store", "stores", multiple=True, required=True, help="As of KVTransfer; several times.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Write the rows to this JSON file.")
def main(
    name: str,
    layers: int | None,
    device: str,
    tokens: str,
    stores: tuple[str, ...],
    rounds: int,
    out: Path | None,
) -> None:
    """Time to the first token, computed and loaded."""
    config = model_config(load_config(name))
    if layers is not None:
        config = replace(config, num_layers=layers)
    here = place(device)
    with torch.inference_mode():
        model = random_model(config, "bf16", None, device, here.policy, block_size=BLOCK)
    given = f" --layers {layers}" if layers else ""
    command = f"python -m lab.kv_transfer --model {name}{given} --device {device} --tokens {tokens} --rounds {rounds}"
    command += "".join(f" --store {store}" for store in stores)
    rows: list[dict[str, Any]] = []
    for length in map(int, tokens.split(",")):
        rows += measure(model, length, list(stores), rounds)
        if out is not None:  # after every length, so that an interrupted run keeps its results
            about = environment(here.target, command)
            write_result(out, {"about": about, "model": name, "rows": rows})
    console.table(
        f"First token of {name}, {config.num_layers} layers",
        ["tokens", "case", "ms", "GB", "GB/s", "saved after, ms", "failures"],
        [
            [
                row["tokens"],
                row["case"],
                f"{row['first_token_s'] * 1e3:.1f}",
                f"{row['bytes'] / 1e9:.2f}",
                f"{row['bytes'] / 1e9 / row['first_token_s']:.1f}",
                "" if row["saved_s"] is None else f"{row['saved_s'] * 1e3:.0f}",
                row["failures"] or "",
            ]
            for row in rows
        ],
        right=("tokens", "ms", "GB", "GB/s", "saved after, ms"),
    )


if __name__ == "__main__":
    main()
