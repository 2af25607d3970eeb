"""Blocks from the cache of one process to that of another (`--kv-transfer device:NAME`), beside a plain copy of as many bytes between two GPUs.

    python -m lab.kv_caches --device cuda --tokens 32768 --engines --out kv_caches.json

Two processes see one GPU each, as replicas do. The first one has blocks of the model in its cache and publishes them; the second one finds them
by their keys, copies them, and computes their digests: all of that is timed (``find_s`` is the part before the copies). ``adjacent`` blocks are
neighbours in both caches, ``scattered`` ones in neither. Each is copied in both ways, as ``runs`` of neighbours beside digests, and by
``launches`` of one kernel that also hashes; the store takes the one that `ScatteredBlocks.are` says. The copies of runs (``copy_s``) and
the digests (``digest_s``) are timed alone, too. ``plain`` is `Tensor.copy_` between two GPUs of this process. With ``--engines`` two
engines with random weights follow: the first one computes a prompt, the second one has its first token ``computed``, from its ``prefix cache``,
and ``loaded`` from the other's cache; the tokens have to be equal. On a CPU both processes are on it.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from gristmill import console
from gristmill.autotune.environment import environment
from gristmill.autotune.place import place
from gristmill.bench.decode import model_config
from gristmill.bench.shapes import load_config
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.kv_cache.paged import PagedCache
from gristmill.runtime.kv_transfer import scattered
from gristmill.runtime.kv_transfer.device import open_pool
from gristmill.runtime.kv_transfer.peer_carrier import PeerCarrier
from gristmill.runtime.models import Model
from gristmill.runtime.parallel.loading import environments
from gristmill.runtime.scheduler import Scheduler, SchedulerConfig
from gristmill.tools.random_model import random_model
from lab.kv_transfer import BLOCK, first_token, make_engine
from lab.result import write_result

SECONDS = 400.0
"""Longest time of one answer of a process."""
NAME = f"lab-{os.getpid()}"
ORDERS = ("adjacent", "scattered")
WAYS = {"runs": 0, "launches": 1 << 62}
"""`scattered.LONG_RUN` by the way in which blocks are then copied."""
PARTS = ("find", "copy", "digest")
"""Of the time of a case; copies and digests alone."""


def keys_and_blocks(count: int, order: str, seed: int) -> tuple[list[bytes], list[int]]:
    """Keys of `count` blocks, and the blocks: the first half of a cache in their order, or the second half in any."""
    keys = [hashlib.sha256(f"{order} {i}".encode()).digest() for i in range(count)]
    blocks = list(range(count)) if order == "adjacent" else list(range(count, 2 * count))
    if order == "scattered":
        random.Random(seed).shuffle(blocks)
    return keys, blocks


def make_carrier(
    config: ModelConfig, count: int, name: str, device: torch.device
) -> tuple[PeerCarrier, PagedCache]:
    """A cache with room for twice `count` blocks, all of which belong to somebody, and its carrier."""
    scheduler = Scheduler(SchedulerConfig(2 * count, BLOCK, max_seqs=1))
    scheduler.pool.allocate(2 * count)
    cache = PagedCache(config, 2 * count, BLOCK, torch.bfloat16, device)
    return open_pool(name).carrier(cache, device, scheduler, bytes(32)), cache


def publish_blocks(
    connection: Connection, config: ModelConfig, count: int, name: str, device: torch.device
) -> None:
    """The first process: fill a cache, publish its blocks, and keep them until the connection is closed."""
    carrier, cache = make_carrier(config, count, name, device)
    cache.storage.view(torch.int16).random_()
    begin = time.perf_counter()
    for order in ORDERS:
        carrier.send(*keys_and_blocks(count, order, seed=1))()
    connection.send((time.perf_counter() - begin) / len(ORDERS))
    _until_closed(connection)
    carrier.close()


def read_blocks(
    connection: Connection, config: ModelConfig, count: int, name: str, device: torch.device, rounds: int
) -> None:
    """The second process: read the blocks `rounds` times, and send what that took."""
    carrier, cache = make_carrier(config, count, name, device)
    samples: dict[str, list[dict[str, float]]] = {f"{order}, {way}": [] for order in ORDERS for way in WAYS}
    for number in range(rounds + 1):  # the first one maps memory
        for order, way in product(ORDERS, WAYS):
            keys, blocks = keys_and_blocks(count, order, seed=2)
            scattered.LONG_RUN = WAYS[way]
            cache.storage.zero_()
            _wait(device)
            begin = time.perf_counter()
            found = carrier.find(keys, 0, (0,))
            if found.failures or found.length != count:
                raise RuntimeError(f"{order}: {found.length} of {count} blocks were found: {found.failures}")
            looked_up = time.perf_counter()
            received = carrier.receive(found, 0, blocks)()
            seconds = time.perf_counter() - begin
            if received.failures or received.whole != count:
                raise RuntimeError(
                    f"{order}, {way}: {received.whole} of {count} blocks are right: {received.failures}"
                )
            if number:
                alone = alone_seconds(carrier, found.content, blocks, device) if way == "runs" else {}
                samples[f"{order}, {way}"].append({"s": seconds, "find_s": looked_up - begin, **alone})
    connection.send((carrier.block_bytes, samples))
    carrier.close()


def alone_seconds(
    carrier: PeerCarrier, where: Any, blocks: list[int], device: torch.device
) -> dict[str, float]:
    """Seconds of all copies without digests, and of all digests without copies."""
    into, begin = np.asarray(blocks), time.perf_counter()
    sources = {which: peer.connect(carrier._transport) for which, peer in enumerate(where.peers)}
    with carrier._on_stream():
        begun = [
            carrier._start(where[part], into[part], sources, None)
            for part in carrier._digests.parts(len(blocks))
        ]
        for wait in chain.from_iterable(begun):
            wait()
    _wait(device)
    copied = time.perf_counter()
    with carrier._on_stream():
        carrier._digests.of(blocks).cpu()
    return {"copy_s": copied - begin, "digest_s": time.perf_counter() - copied}


def lab_model(name: str, layers: int | None, device: str, tokens: int) -> tuple[Model, list[int]]:
    """A model with random weights, and a prompt of `tokens` tokens and one."""
    config = lab_config(name, layers)
    with torch.inference_mode():
        model = random_model(config, "bf16", None, device, place(device).policy, block_size=BLOCK)
    prompt = torch.randint(0, config.vocab_size, (tokens + 1,), generator=torch.Generator().manual_seed(0))
    return model, prompt.tolist()


def compute_prompt(
    connection: Connection, name: str, layers: int | None, device: str, tokens: int, store: str
) -> None:
    """The first engine: compute the prompt, and keep its blocks until the connection is closed."""
    model, ids = lab_model(name, layers, device, tokens)
    engine = make_engine(model, tokens, store)
    _, token = first_token(engine, ids)
    if not engine.flush_kv_transfer(SECONDS):
        raise RuntimeError("the blocks were not published in time")
    connection.send(token)
    _until_closed(connection)
    engine.close()


def load_prompt(
    connection: Connection, name: str, layers: int | None, device: str, tokens: int, store: str, rounds: int
) -> None:
    """The second engine: send the times to the first token of the prompt, its tokens, and what was loaded."""
    model, ids = lab_model(name, layers, device, tokens)
    loading, computing = make_engine(model, tokens, store), make_engine(model, tokens, None)
    samples: dict[str, list[float]] = {"computed": [], "prefix cache": [], "loaded": []}
    answers = set()
    for number in range(rounds + 1):  # the first one compiles
        computing.reset_prefix_cache()
        loading.reset_prefix_cache()
        for case, engine in zip(samples, (computing, computing, loading), strict=True):
            seconds, token = first_token(engine, ids)
            answers.add(token)
            if number:
                samples[case].append(seconds)
    status = loading.status().kv_transfer
    if status is None or status.failures or status.loaded_tokens != tokens * (rounds + 1):
        raise RuntimeError(f"the prompt was not loaded in every round: {status}")
    connection.send((status.loaded_bytes // (rounds + 1), samples, answers))
    loading.close()


def lab_config(name: str, layers: int | None) -> ModelConfig:
    """The configuration of a model, with other layers if they are given."""
    config = model_config(load_config(name))
    return config if layers is None else replace(config, num_layers=layers)


def plain_copies(nbytes: int, rounds: int, devices: Sequence[torch.device]) -> list[float]:
    """Seconds of copies between two devices."""
    source, into = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for device in devices)
    samples = []
    for _ in range(rounds + 1):
        _wait(*devices)
        begin = time.perf_counter()
        into.copy_(source, non_blocking=True)
        _wait(*devices)
        samples.append(time.perf_counter() - begin)
    return samples[1:]


@contextmanager
def in_process(environment: Mapping[str, str], work: Callable[..., None]) -> Iterator[Connection]:
    """Run work(connection) in a process, with these variables; yields the other end. It ends after the connection is closed."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=work, args=(theirs,), daemon=True)
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        child.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        child.join(30)
        if child.is_alive():
            child.kill()


def answer(connection: Connection) -> Any:
    """The next message of a process. RuntimeError: it ended, or does not answer."""
    if not connection.poll(SECONDS):
        raise RuntimeError(f"a process did not answer within {SECONDS:g} s")
    try:
        return connection.recv()
    except EOFError:
        raise RuntimeError("a process ended before it answered; its error is above") from None


def _until_closed(connection: Connection) -> None:
    try:
        connection.recv()
    except EOFError:
        return


def _wait(*devices: torch.device) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def measure_caches(
    config: ModelConfig, tokens: int, device: str, rounds: int, pool: str
) -> list[dict[str, Any]]:
    """A row for each order of blocks, and for a plain copy."""
    count, here = tokens // BLOCK, torch.device(device)
    first, second = environments(2, 0, {"device": device})
    with in_process(
        first, partial(publish_blocks, config=config, count=count, name=pool, device=here)
    ) as owner:
        published = answer(owner)
        read = partial(read_blocks, config=config, count=count, name=pool, device=here, rounds=rounds)
        with in_process(second, read) as reader:
            block_bytes, samples = answer(reader)
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)] if device == "cuda" else [here, here]
    plain = plain_copies(count * block_bytes, rounds, devices)
    rows: list[dict[str, Any]] = [{"case": "plain", "s": statistics.median(plain), "samples_s": plain}]
    for case, measured in samples.items():
        medians = {name: statistics.median(one[name] for one in measured) for name in measured[0]}
        whole = [one["s"] for one in measured]
        rows.append({"case": case, **medians, "published_s": published, "samples_s": whole})
    return [
        {"tokens": tokens, "bytes": count * block_bytes, "of_plain": rows[0]["s"] / row["s"], **row}
        for row in rows
    ]


def measure_engines(
    name: str, layers: int | None, tokens: int, device: str, rounds: int, pool: str
) -> list[dict[str, Any]]:
    """A row for each way to the first token."""
    tokens = tokens // BLOCK * BLOCK
    store = f"device:{pool}"
    first, second = environments(2, 0, {"device": device})
    given: dict[str, Any] = {
        "name": name,
        "layers": layers,
        "device": device,
        "tokens": tokens,
        "store": store,
    }
    with in_process(first, partial(compute_prompt, **given)) as owner:
        token = answer(owner)
        with in_process(second, partial(load_prompt, **given, rounds=rounds)) as reader:
            nbytes, samples, answers = answer(reader)
    if answers != {token}:
        raise RuntimeError(f"the first engine answers {token}, the second one {answers}")
    return [
        {
            "tokens": tokens,
            "case": f"engine, {case}",
            "bytes": nbytes if case == "loaded" else 0,
            "s": statistics.median(seconds),
            "samples_s": seconds,
        }
        for case, seconds in samples.items()
    ]


@click.command()
@click.option("--model", "name", default="llama-3-8b", show_default=True, help="As of kernelbench decode.")
@click.option("--layers", type=click.IntRange(1), help="Layers. Default: the model's.")
@click.option("--device", default="cuda", show_default=True, type=click.Choice(["cuda", "cpu"]))
@click.option("--tokens", type=click.IntRange(BLOCK), default=32768, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=10, show_default=True)
@click.option("--transport", default="mapped", show_default=True, type=click.Choice(["mapped", "nixl"]))
@click.option("--engines", is_flag=True, help="Also two engines with the model.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the rows to this JSON file.")
def main(
    name: str,
    layers: int | None,
    device: str,
    tokens: int,
    rounds: int,
    transport: str,
    engines: bool,
    out: Path | None,
) -> None:
    """Blocks between the caches of two processes, beside a plain copy."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        raise click.UsageError(f"two GPUs are needed, {torch.cuda.device_count()} are here; try --device cpu")
    given = f" --layers {layers}" if layers else ""
    command = (
        f"python -m lab.kv_caches --model {name}{given} --device {device} --tokens {tokens} --rounds {rounds}"
    )
    command += f" --transport {transport}" + (" --engines" if engines else "")
    pool = NAME if transport == "mapped" else f"{NAME}:{transport}"
    rows: list[dict[str, Any]] = []
    measures: list[Callable[[], list[dict[str, Any]]]] = [
        partial(measure_caches, lab_config(name, layers), tokens, device, rounds, pool)
    ]
    if engines:
        measures.append(partial(measure_engines, name, layers, tokens, device, rounds, pool))
    try:
        for measure in measures:
            rows += measure()
            if out is not None:  # after each, so that an interrupted run keeps its results
                about = environment(place(device).target, command)
                write_result(out, {"about": about, "model": name, "transport": transport, "rows": rows})
    finally:
        shutil.rmtree(f"/dev/shm/gristmill-{NAME}", ignore_errors=True)
    console.table(
        f"{tokens} tokens of {name}",
        ["case", "ms", *PARTS, "GB/s", "of plain"],
        [
            [
                row["case"],
                f"{row['s'] * 1e3:.2f}",
                *(f"{row[f'{part}_s'] * 1e3:.2f}" if f"{part}_s" in row else "" for part in PARTS),
                f"{row['bytes'] / row['s'] / 1e9:.1f}" if row["bytes"] else "",
                f"{row['of_plain']:.2f}" if "of_plain" in row else "",
            ]
            for row in rows
        ],
        right=("ms", *PARTS, "GB/s", "of plain"),
    )


if __name__ == "__main__":
    main()
