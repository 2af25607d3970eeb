"""What the programs that time the kernels of one operation share: the command line, calls of a kernel, and samples of kernels with
several settings, interleaved."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from gristmill.autotune.device import device_target
from gristmill.autotune.store import dump
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store
from lab.gpu_graphs import Graphs, environment
from lab.result import write_result

Calls = list[Callable[[], Any]]
Sweep = tuple[str, list[int]]


class Run:
    """A run of the program `lab.NAME` with the present command line: its rows, times for a store, and where both are written."""

    def __init__(self, name: str, out: Path | None, store: Path | None = None) -> None:
        self.command = f"python -m lab.{name} {shlex.join(sys.argv[1:])}"
        self.out, self.store_path, self.store = out, store, Store()
        self.begin, self.before = time.monotonic(), environment()
        self.rows: list[dict[str, Any]] = []

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.begin

    def save(self, form: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> None:
        """Write the result file and the store; `form` makes the content of the file from that of all rows."""
        if self.out:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            content = {"command": self.command, "before": self.before, "after": environment()}
            write_result(self.out, form(content | {"rows": self.rows}))
        if self.store_path:
            self.store_path.write_text(dump(self.store))


def linear_options(description: str | None, kernels: str, m: str) -> argparse.ArgumentParser:
    """The options of the programs that time linear; `kernels` and `m` are defaults."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--store", type=Path, help="also write the times of registered kernels as a store")
    parser.add_argument("--m", default=m, help="rows of x, by commas")
    parser.add_argument("--kernels", default=kernels, help="registered ones, by commas")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no further weight starts")
    return parser


def program(
    name: str,
    description: str | None,
    cases: Iterable[str],
    kernels: str,
    timed: Callable[[str, list[str], Sweep | None, int, float], dict[str, Any]],
    shown: Iterable[str],
    floors: Callable[[dict[str, Any]], None] | None = None,
) -> int:
    """The program `lab.NAME`: a row for each of the cases that the command line names, printed and written to --out.

    Args:
        timed: the row of a case, from its name, the kernels, the sweep, the rounds and the seconds before.
        shown: keys of a row to print.
        floors: adds to a row what takes time to measure; makes it an option.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = ",".join(case for case in cases if not case.startswith("smallest"))
    parser.add_argument("--cases", default=default, help="by commas")
    parser.add_argument("--kernels", default=kernels, help="by commas")
    parser.add_argument(
        "--set", help="NAME=1,2,3: the first kernel also with these values in its configuration"
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0.3, help="of replays before the samples of a case")
    if floors is not None:
        parser.add_argument("--floors", action="store_true", help="also measure the floors")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    run = Run(name, options.out)
    for case in options.cases.split(","):
        row = timed(case, options.kernels.split(","), sweep_of(options.set), options.rounds, options.seconds)
        if floors is not None and options.floors:
            floors(row)
        run.rows.append(row)
        print(case, *(row[key] for key in shown), flush=True)
        run.save()
    return 0


def sweep_of(text: str | None) -> Sweep | None:
    """The setting and the values of --set."""
    if not text:
        return None
    name, _, values = text.partition("=")
    return name, [int(value) for value in values.split(",")]


class Launch:
    """A registered kernel with its default configuration for a problem, updated by `changes`, and a workspace if it needs one.
    ValueError if it refuses the problem."""

    def __init__(self, kernel: Kernel, problem: Problem, changes: Mapping[str, Any], device: str) -> None:
        refusal = kernel.accepts(problem)
        if refusal is not None:
            raise ValueError(f"{kernel.name}: {refusal}")
        self.config = {**kernel.config(problem, device_target(device, Policy())), **changes}
        size = kernel.workspace(problem, self.config).bytes
        self.workspace = torch.zeros(size, dtype=torch.uint8, device=device) if size else None
        self._launch, self._call = kernel.load(), default_registry().op(kernel.op).Call

    def call(self, *arguments: Any, **named: Any) -> Callable[[], Any]:
        """A call with these arguments and outputs."""
        return partial(self._launch, self.config, self._call(*arguments, **named))


def block_table(blocks: list[int]) -> Tensor:
    """int32 [seqs, the most blocks]: shuffled places in a pool of sum(blocks) for sequences of so many blocks."""
    table = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
    for row, part in zip(table, torch.split(torch.randperm(sum(blocks)).int(), blocks), strict=True):
        row[: len(part)] = part
    return table


def compare(
    kernels: list[str],
    sweep: Sweep | None,
    calls_of: Callable[[str, dict[str, int]], Calls],
    out: Tensor,
    rounds: int,
    seconds: float,
    peers: dict[str, Calls] | None = None,
) -> dict[str, dict[str, Any]]:
    """ "us", the medians, and "samples", in microseconds, and "difference" of each output from the first kernel's, by label.

    Args:
        calls_of: the calls of a kernel with changes to its configuration, which write `out`.
        peers: calls that are timed beside them; compared too where they write `out`.
    """
    graphs, outputs = Graphs(), {}
    candidates: dict[str, tuple[str, dict[str, int]]] = {kernel: (kernel, {}) for kernel in kernels}
    if sweep is not None:
        setting, values = sweep
        candidates |= {f"{kernels[0]} {setting}={value}": (kernels[0], {setting: value}) for value in values}
    for label, (kernel, changes) in candidates.items():
        calls = calls_of(kernel, changes)
        out.fill_(float("nan") if out.is_floating_point() else -1)
        calls[0]()
        outputs[label] = out.float().cpu()
        graphs.add(label, calls)
    for label, calls in (peers or {}).items():
        out.fill_(float("nan") if out.is_floating_point() else -1)
        calls[0]()
        if not (out.isnan() if out.is_floating_point() else out == -1).any():  # it wrote there
            outputs[label] = out.float().cpu()
        graphs.add(label, calls)
    graphs.settle(seconds)
    samples = graphs.samples(rounds)
    first = outputs[kernels[0]]
    return {
        "us": {label: round(median(times), 2) for label, times in samples.items()},
        "difference": {
            label: float((output - first).norm() / first.norm()) for label, output in outputs.items()
        },
        "samples": {label: [round(time, 2) for time in times] for label, times in samples.items()},
    }


def rates(work: int, us: Mapping[str, float], unit: float = 1e6, digits: int = 1) -> dict[str, float]:
    """Work per time by label: operations as TFLOP/s, bytes as TB/s."""
    return {label: round(work / time / unit, digits) for label, time in us.items()}
