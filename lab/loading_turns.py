"""The runs that `lab.loading` times, each in its own process: a checkpoint by safetensors, by a reader, by the loader."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from gristmill.quant import quantize
from gristmill.quant.checkpoints.weights import Weights
from gristmill.quant.formats import open_format
from gristmill.quant.formats.contract import owned
from gristmill.quant.packed import pack
from gristmill.runtime.loader.config import open_checkpoint
from lab.loading_cases import Made


def copied(made: Made) -> list[Tensor]:
    """The yardstick: every tensor in memory, by safetensors."""
    tensors = []
    for file in sorted(made.folder.glob("*.safetensors")):
        with safe_open(file, "pt") as source:
            tensors += [source.get_tensor(name).clone() for name in source.keys()]  # noqa: SIM118
    return tensors


def readers(made: Made) -> list[Any]:
    """Every weight by its format's reader."""
    checkpoint, form = open_checkpoint(made.path), open_format(made.config)
    results = []
    for weight in made.table.weights:
        for name, rows in zip(weight.sources, weight.rows, strict=True):
            shape = (rows, weight.columns or 1)
            weight_read = form.read(checkpoint, name, (weight.experts, *shape) if weight.stacked else shape)
            assert weight_read is not None
            results.append(owned(weight_read.weight))
    return results


def loaded(made: Made) -> list[Any]:
    """Every parameter by the runtime's loader."""
    weights = Weights(
        open_checkpoint(made.path),
        made.table,
        torch.bfloat16,
        torch.device("cpu"),
        None,
        open_format(made.config),
    )
    parameters = []
    for weight in made.table.weights:
        parameters += (
            [weights.linear(weight.target)]
            if weight.stacked
            else [part.weight for part in weights.parts(weight.target)]
        )
    weights.finish()
    return parameters


def packed(made: Made) -> list[Any]:
    """Every parameter by the runtime's loader, in the layout that kernels of all devices read."""
    return [pack(weight, "plain_v1") for weight in loaded(made)]


CALLS: dict[str, Callable[[Made], list[Any]]] = {
    "safetensors": copied,
    "reader": readers,
    "loader": loaded,
    "packed": packed,
}


def read_bytes() -> int:
    """Bytes that this process has read from disks; 0 if the system does not report them."""
    try:
        return int(Path("/proc/self/io").read_text().split("read_bytes:")[1].split()[0])
    except (OSError, IndexError):
        return 0


def turn(reader: str, made: Made) -> dict[str, float]:
    """Wall-clock and processor seconds of one call, and bytes read from the disk. The result lives until the end."""
    pack(quantize(torch.ones(16, 32), "int4_g32"), "plain_v1")  # imports everything, with the next two lines
    open_checkpoint(made.path)
    open_format(made.config)
    before, wall, cpu = read_bytes(), time.perf_counter(), time.process_time()
    result = CALLS[reader](made)
    sample = {
        "wall": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "disk": float(read_bytes() - before),
    }
    del result
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc
    if trim is not None:
        trim(0)
    return sample
