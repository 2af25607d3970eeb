"""Bytes of a KV cache from the memory of one process to that of another: a plain peer copy, CUDA IPC, and NIXL where it is installed.

    python -m lab.kv_peer --device cuda --tokens 32768 --out kv_peer.json

A child process has the blocks on the first GPU, as a prefill engine does; this process reads them to the second one. ``plain`` is `Tensor.copy_`
between two GPUs of this process, ``ipc`` one copy from the memory of the child that the driver has mapped, ``nixl`` one READ of NIXL's agent,
``nixl/8`` one of 8 descriptors for neighbouring parts (--descriptors). UCX is configured by environment variables, which are part of the result.
Rows are gathered already: neither gathering, digests nor the cache are measured. In each round every case runs once, in turn, and after it all
bytes are compared. On a CPU both map the memory, and ``ipc`` is a copy from it. Bytes are those of Llama-3-8B's cache: 128 KiB per token.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from gristmill import console
from gristmill.autotune.environment import environment
from gristmill.autotune.place import place
from gristmill.runtime.kv_cache import host_memory
from gristmill.runtime.kv_transfer.nixl import state_at_end
from gristmill.runtime.kv_transfer.peer_memory import PeerMemory, call_driver
from gristmill.runtime.kv_transfer.peer_memory import export as export_memory
from lab.result import write_result

TOKEN = 2 * 32 * 8 * 128 * 2
"""Bytes of a token: keys and values, layers, heads, head size, bf16."""
SECONDS = 30.0
"""Longest time of one answer of the child or of one transfer."""


def _agent(name: str) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


def contents(nbytes: int, device: torch.device) -> Tensor:
    """The bytes that are transferred: int64, each by its place, so that no two parts of them are alike. Same on every device."""
    values = torch.arange(nbytes // 8, dtype=torch.int64, device=device)
    return values.mul_(0x5851F42D4C957F2D).view(torch.uint8)


def export(connection: Connection, device_name: str, nbytes: int) -> None:
    """The child: fill memory, say how it is reached, and keep it until the parent closes the connection."""
    device, told = torch.device(device_name), dict[str, Any]()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        memory = contents(nbytes, device)
        torch.cuda.synchronize()
    else:
        memory = host_memory.zeros(nbytes)
        memory.copy_(contents(nbytes, device))
    told["ipc"] = export_memory(memory)
    if find_spec("nixl") is not None:
        agent = _agent("prefill")
        registered = agent.register_memory(memory)
        told["nixl"] = agent.get_agent_metadata(), memory.data_ptr(), max(0, memory.get_device())
    connection.send(told)
    with suppress(EOFError):
        connection.recv()
    if "nixl" in told:
        agent.deregister_memory(registered)


def ipc_reader(told: dict[str, Any], into: Tensor) -> Callable[[], object]:
    """What copies the child's memory to `into`."""
    there, nbytes = PeerMemory(told["ipc"], into.device), into.numel()
    if into.device.type == "cpu":
        return lambda: ctypes.memmove(into.data_ptr(), there.address, nbytes)
    source, target = ctypes.c_uint64(there.address), ctypes.c_uint64(into.data_ptr())

    def read() -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        call_driver("cuMemcpyDtoDAsync_v2", target, source, ctypes.c_size_t(nbytes), stream)

    return read


def nixl_readers(
    told: dict[str, Any], into: Tensor, descriptors: tuple[int, ...]
) -> dict[str, Callable[[], None]]:
    """By case, what reads the child's memory to `into` by NIXL in so many parts; `into` is registered now. RuntimeError of a read: NIXL's state, or
    none in time."""
    metadata, address, device = told["nixl"]
    agent = _agent("decode")
    agent.register_memory(into)
    peer = agent.add_remote_agent(metadata)
    name = peer.decode() if isinstance(peer, bytes) else peer
    kind, own = ("DRAM", 0) if into.device.type == "cpu" else ("VRAM", into.get_device())
    handles = dict[str, Any]()
    for count in descriptors:
        size = -(-into.numel() // count)
        parts = [(begin, min(size, into.numel() - begin)) for begin in range(0, into.numel(), size)]
        here = agent.get_xfer_descs([(into.data_ptr() + begin, n, own) for begin, n in parts], kind)
        there = agent.get_xfer_descs([(address + begin, n, device) for begin, n in parts], kind)
        case = "nixl" if count == 1 else f"nixl/{count}"
        handles[case] = agent.initialize_xfer("READ", here, there, name)
    return {case: partial(_read, agent, handle) for case, handle in handles.items()}


def _read(agent: Any, handle: Any) -> None:
    agent.transfer(handle)
    state = state_at_end(agent, handle, SECONDS)
    if state != "DONE":
        raise RuntimeError(f"NIXL's transfer is {state} after at most {SECONDS:g} s")


def measure(
    device_name: str, nbytes: int, rounds: int, descriptors: tuple[int, ...] = (1,)
) -> list[dict[str, Any]]:
    """A row for each case. RuntimeError: the child ended or did not answer, or bytes arrived that it does not have."""
    cuda = device_name == "cuda"
    first, second = (torch.device("cuda", 0), torch.device("cuda", 1)) if cuda else (torch.device("cpu"),) * 2
    if cuda:
        torch.cuda.set_device(second)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=export, args=(theirs, str(first), nbytes), daemon=True)
    child.start()
    theirs.close()
    try:
        if not ours.poll(4 * SECONDS):
            raise RuntimeError(f"the child did not export its memory within {4 * SECONDS:g} s")
        try:
            told = ours.recv()
        except EOFError:
            raise RuntimeError("the child ended before it exported its memory; its error is above") from None
        return _rounds(told, first, second, nbytes, rounds, descriptors)
    finally:
        ours.close()
        child.join(SECONDS)
        if child.is_alive():
            child.kill()


def _rounds(
    told: dict[str, Any],
    first: torch.device,
    second: torch.device,
    nbytes: int,
    rounds: int,
    descriptors: tuple[int, ...],
) -> list[dict[str, Any]]:
    source, expected = contents(nbytes, first), contents(nbytes, second)
    into = torch.zeros(nbytes, dtype=torch.uint8, device=second)
    cases: dict[str, Callable[[], Any]] = {"plain": lambda: into.copy_(source, non_blocking=True)}
    cases["ipc"] = ipc_reader(told, into)
    if "nixl" in told:
        cases |= nixl_readers(told, into, descriptors)
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):  # the first one maps memory and connects
        for name, copy in cases.items():
            into.zero_()
            _wait(first, second)
            begin = time.perf_counter()
            copy()
            _wait(second)
            seconds = time.perf_counter() - begin
            if not torch.equal(into, expected):
                raise RuntimeError(f"{name}: {int((into != expected).sum())} of {nbytes} bytes are wrong")
            if number:
                samples[name].append(seconds)
    plain = statistics.median(samples["plain"])
    return [
        {
            "case": name,
            "bytes": nbytes,
            "s": statistics.median(seconds),
            "of_plain": plain / statistics.median(seconds),
            "samples_s": seconds,
        }
        for name, seconds in samples.items()
    ]


def _wait(*devices: torch.device) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


@click.command()
@click.option("--device", default="cuda", show_default=True, type=click.Choice(["cuda", "cpu"]))
@click.option("--tokens", type=click.IntRange(1), default=32768, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=10, show_default=True)
@click.option(
    "--descriptors", default="1", show_default=True, help="Parts of NIXL's reads, separated by commas."
)
@click.option("--out", type=click.Path(path_type=Path), help="Write the rows to this JSON file.")
def main(device: str, tokens: int, rounds: int, descriptors: str, out: Path | None) -> None:
    """Bytes of a KV cache between two processes, beside a plain copy."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        raise click.UsageError(f"two GPUs are needed, {torch.cuda.device_count()} are here; try --device cpu")
    counts = tuple(int(count) for count in descriptors.split(","))
    rows = measure(device, tokens * TOKEN, rounds, counts)
    if out is not None:
        command = f"python -m lab.kv_peer --device {device} --tokens {tokens} --rounds {rounds} --descriptors {descriptors}"
        about = environment(place(device).target, command)
        nixl = "measured" if any(row["case"].startswith("nixl") for row in rows) else "not installed"
        ucx = {name: value for name, value in sorted(os.environ.items()) if name.startswith("UCX_")}
        write_result(out, {"about": about, "tokens": tokens, "nixl": nixl, "ucx": ucx, "rows": rows})
    console.table(
        f"{tokens} tokens between two processes",
        ["case", "ms", "GB/s", "of plain"],
        [
            [r["case"], f"{r['s'] * 1e3:.2f}", f"{r['bytes'] / r['s'] / 1e9:.1f}", f"{r['of_plain']:.2f}"]
            for r in rows
        ],
        right=("ms", "GB/s", "of plain"),
    )


if __name__ == "__main__":
    main()
