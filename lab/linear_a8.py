"""Linear with int8 activations on a CPU beside onnxruntime, ggml, torch and our weight-only kernels, interleaved.

    python -m lab.linear_a8 --threads 1 --ggml build/ggml/src --out linear_a8.json

With one thread, time is thread CPU time, so that descheduling on a shared machine does not count. Each round reads 256 MiB (a float32 sum),
then times every candidate of every case in turn, with cold weights: as many copies of each weight as four times the last-level cache holds are
used in rotation. x is float32, as onnxruntime and ggml take it. onnxruntime, ggml and our a8 kernels all quantize x to int8 in the call. The
error is relative (2-norm), against the product in float64 of x, before it is quantized, and the weight as the candidate has it. A peer that is
not installed is left out, with its reason.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import torch

from gristmill import console
from gristmill.autotune.environment import environment
from gristmill.autotune.place import place
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.common import dtype_name
from gristmill.kernels.linear.op import OP
from gristmill.kernels.load import load
from gristmill.quant import QuantTensor, pack, quantize
from lab.linear_peers import Ggml, ggml_blocks, onnxruntime_call
from lab.result import write_result

FLOOR_BYTES = 256 << 20
PAUSE = 0.02
"""Seconds before each candidate: the threads of the one before have stopped to wait actively."""
SCHEMES = ("int4_g128", "int8_g128")
OURS = {
    "int4_g128": ("int4_g128.int8_g128", "int4_g128", "int4_g32.int8_g32"),
    "int8_g128": ("int8_g128.int8_g128", "int8_ch.int8_token", "int8_g128"),
}
"""Our candidates of a case: schemes. Those without an activation format multiply floats."""
GGML = {
    "int4_g128": (("q4_0", "repacked"), ("q4_0", "plain")),
    "int8_g128": (("q8_0", "plain"),),
}


@dataclass
class Candidate:
    """One way to multiply: calls over cold copies of its weight, its error, and samples in microseconds."""

    name: str
    calls: list[Callable[[], torch.Tensor]]
    bytes: int
    error: float
    clock: Callable[[], float]
    us: list[float] = field(default_factory=list)
    next_copy: int = 0

    def sample(self) -> None:
        """Time five calls, after one that wakes the threads; of calls over 20 ms, only one."""
        for index in range(6):
            call = self.calls[self.next_copy % len(self.calls)]
            self.next_copy += 1
            start = self.clock()
            call()
            us = (self.clock() - start) * 1e6
            if index or us > 20e3:
                self.us.append(round(us, 2))
            if us > 20e3:
                break


class Case:
    """One scheme, shape and number of rows, with its candidates."""

    def __init__(self, scheme: str, n: int, k: int, m: int, target: Target, ggml: Ggml | None) -> None:
        self.scheme, self.n, self.k, self.m = scheme, n, k, m
        self.x = torch.randn(m, k, generator=torch.Generator().manual_seed(1))
        self.clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        self.candidates: list[Candidate] = []
        self.refused: dict[str, str] = {}
        for name in OURS[scheme]:
            self._ours(name, target)
        self._try("onnxruntime", self._onnxruntime)
        for kind, buffer in GGML[scheme]:
            self._try(f"ggml {kind} {buffer}", partial(self._ggml, ggml, kind, buffer))
        # The faster one on a CPU without bf16 instructions: bfloat16 where reading the weight takes longest.
        dtype = torch.bfloat16 if m <= 16 else torch.float32
        wide, rows = weight_of(None, n, k).to(dtype), self.x.to(dtype)
        copies = [wide.clone() for _ in range(copies_of(wide.nbytes, m))]
        calls: list[Callable[[], torch.Tensor]] = [
            partial(torch.nn.functional.linear, rows, copy) for copy in copies
        ]
        self._add(f"torch {dtype_name(dtype)}", calls, wide.nbytes, wide.float())

    def _try(self, name: str, add: Callable[[], None]) -> None:
        try:
            add()
        except (ImportError, LookupError, RuntimeError) as reason:
            self.refused[name] = repr(reason)

    def _add(
        self, name: str, calls: list[Callable[[], torch.Tensor]], bytes: int, weight: torch.Tensor
    ) -> None:
        expected = self.x.double() @ weight.double().T
        error = float((calls[0]().double() - expected).norm() / expected.norm())
        self.candidates.append(Candidate(name, calls, bytes, error, self.clock))

    def _ours(self, scheme: str, target: Target) -> None:
        kernel = default_registry().kernel("linear", "linear_a8_cpu" if "." in scheme else "linear_cpu")
        weight = weight_of(scheme.partition(".")[0], self.n, self.k)
        packed = pack(weight, "cpu_rows16_v1").tensors
        problem = OP.problem(f"m={self.m},n={self.n},k={self.k},x=fp32,w={scheme}")
        config, launch = dict(kernel.config(problem, target)), load(kernel)
        out = torch.empty(self.m, self.n)

        def call(tensors: list[torch.Tensor]) -> torch.Tensor:
            launch(config, OP.Call(self.x, tensors, None, None, False, self.n, None, out=out))
            return out

        copies = [[t.clone() for t in packed] for _ in range(copies_of(weight.nbytes, self.m))]
        self._add(scheme, [partial(call, copy) for copy in copies], weight.nbytes, weight.dequantize())

    def _onnxruntime(self) -> None:
        weight = weight_of(self.scheme, self.n, self.k)
        calls = [
            onnxruntime_call(weight.unpacked(), scales_of(weight).float(), weight.scheme.bits, self.x)
            for _ in range(copies_of(weight.nbytes, self.m))
        ]
        self._add("onnxruntime", calls, weight.nbytes, weight.dequantize())

    def _ggml(self, ggml: Ggml | None, kind: str, buffer: str) -> None:
        if ggml is None:
            raise LookupError("no --ggml")
        weight = weight_of("int4_g32" if kind == "q4_0" else "int8_g32", self.n, self.k)
        half = scales_of(weight).to(torch.float16)
        blocks = ggml_blocks(kind, weight.unpacked(), half)
        zero = weight.scheme.implicit_zero
        wide = (weight.unpacked().float() - zero) * half.float().repeat_interleave(32, -1)
        calls = [ggml.call(kind, buffer, blocks, self.x) for _ in range(copies_of(blocks.numel(), self.m))]
        self._add(f"ggml {kind} {buffer}", calls, blocks.numel(), wide)

    def row(self) -> dict[str, Any]:
        """The case for the result file."""
        return {
            "scheme": self.scheme,
            "n": self.n,
            "k": self.k,
            "m": self.m,
            "refused": self.refused,
            "candidates": [
                {
                    "name": c.name,
                    "bytes": c.bytes,
                    "error": c.error,
                    "median_us": statistics.median(c.us),
                    "least_us": min(c.us),
                    "samples_us": c.us,
                }
                for c in self.candidates
            ],
        }


def scales_of(weight: QuantTensor) -> torch.Tensor:
    """The scales of a weight that has some."""
    if weight.scales is None:
        raise ValueError(f"{weight.scheme} has no scales")
    return weight.scales


@cache
def weight_of(scheme: str | None, n: int, k: int) -> Any:
    """The weight [n, k] of a shape, as a tensor (None) or as a QuantTensor."""
    if scheme is not None:
        return quantize(weight_of(None, n, k), scheme)
    return torch.randn(n, k, generator=torch.Generator().manual_seed(0)) / k**0.5


def copies_of(bytes: int, m: int) -> int:
    """Number of copies of a weight that exceed four times the last-level cache, at most 24; 2 where arithmetic takes longer than reading."""
    cache_bytes = place("cpu").target.l2_bytes or 32 << 20
    return 2 if m > 16 else min(24, max(2, -(-4 * cache_bytes // bytes)))


@click.command()
@click.option("--shape", "shapes", multiple=True, default=("4096x4096", "14336x4096"), show_default=True)
@click.option("--scheme", "schemes", multiple=True, type=click.Choice(SCHEMES), default=SCHEMES)
@click.option("--m", "rows", multiple=True, type=int, default=(1, 8, 64, 512), show_default=True)
@click.option(
    "--threads", type=click.IntRange(1), help="Threads of every candidate. Default: OMP_NUM_THREADS."
)
@click.option(
    "--seconds", type=float, default=4.0, show_default=True, help="Of each case; at least 3 rounds."
)
@click.option(
    "--ggml", "directory", type=click.Path(path_type=Path, exists=True), help="Where libggml-base.so is."
)
@click.option("--out", type=click.Path(path_type=Path), help="Write a result file.")
def main(
    shapes: tuple[str, ...],
    schemes: tuple[str, ...],
    rows: tuple[int, ...],
    threads: int | None,
    seconds: float,
    directory: Path | None,
    out: Path | None,
) -> None:
    """Time linear with int8 activations beside its peers."""
    if threads is not None:
        torch.set_num_threads(threads)
    target = place("cpu").target
    ggml = Ggml(directory) if directory else None
    data = torch.ones(FLOOR_BYTES // 4)
    results: list[dict[str, Any]] = []
    about = {
        **environment(target, command_of(sys.argv[1:])),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "clock": "thread_time" if torch.get_num_threads() == 1 else "perf_counter",
        "system": f"{platform.system()} {platform.machine()}",
        "peers": {"ggml": ggml.version if ggml else None, "onnxruntime": installed("onnxruntime")},
    }
    for shape in shapes:
        n, k = (int(size) for size in shape.split("x"))
        for scheme in schemes:
            for m in rows:
                case = Case(scheme, n, k, m, target, ggml)
                floor: list[float] = []
                began = time.monotonic()
                while len(floor) < 3 or time.monotonic() - began < seconds:
                    time.sleep(PAUSE)
                    start = case.clock()
                    data.sum()
                    floor.append(FLOOR_BYTES / (case.clock() - start) / 1e9)
                    first = len(floor) % len(case.candidates)
                    for candidate in case.candidates[first:] + case.candidates[:first]:
                        time.sleep(PAUSE)
                        candidate.sample()
                results.append({"read_gbs": [round(gbs, 2) for gbs in floor], **case.row()})
                show(results[-1])
                if out:
                    out.parent.mkdir(parents=True, exist_ok=True)
                    write_result(out, {"about": about, "rows": results})


def command_of(arguments: list[str]) -> str:
    """The command line, without the folders of this machine."""
    names = [word.replace("--ggml=", "--ggml ") for word in arguments if word != "--out"]
    shown = ["DIR" if os.sep in word else word for word in names if not word.endswith(".json")]
    return " ".join(["python -m lab.linear_a8", *shown])


def installed(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    from importlib.metadata import PackageNotFoundError

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def show(row: dict[str, Any]) -> None:
    """A case on the screen."""
    read = max(row["read_gbs"])
    operations = 2 * row["m"] * row["n"] * row["k"]
    console.table(
        f"{row['scheme']} {row['n']}x{row['k']}, {row['m']} row(s); reads {read:.1f} GB/s",
        ["candidate", "median µs", "least µs", "of read", "Gop/s", "error"],
        [
            [
                c["name"],
                console.number(c["median_us"]),
                console.number(c["least_us"]),
                f"{c['bytes'] / c['least_us'] / 1e3 / read:.0%}",
                console.number(operations / c["least_us"] / 1e3),
                f"{c['error']:.2e}",
            ]
            for c in row["candidates"]
        ],
        right=("median µs", "least µs", "of read", "Gop/s", "error"),
    )
    for name, reason in row["refused"].items():
        print(f"  {name}: {reason}", flush=True)


if __name__ == "__main__":
    main()
