"""What the programs that time attention share: their options, and interleaved samples of kernels with several settings."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor

from lab.gpu_graphs import Graphs

Calls = list[Callable[[], Any]]
Sweep = tuple[str, list[int]]


def parser(description: str | None, cases: Iterable[str], kernels: str) -> argparse.ArgumentParser:
    """The options; the default of --cases is all but the smallest one."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--cases", default=",".join(name for name in cases if name != "smallest"), help="by commas"
    )
    made.add_argument("--kernels", default=kernels, help="by commas")
    made.add_argument(
        "--set", help="NAME=1,2,3: the first kernel also with these values in its configuration"
    )
    made.add_argument("--rounds", type=int, default=11)
    made.add_argument(
        "--seconds", type=float, default=0.3, help="seconds of replays before the samples of a case"
    )
    made.add_argument("--out", type=Path)
    return made


def sweep_of(text: str | None) -> Sweep | None:
    """The setting and the values of --set."""
    if not text:
        return None
    name, _, values = text.partition("=")
    return name, [int(value) for value in values.split(",")]


def compare(
    kernels: list[str],
    sweep: Sweep | None,
    calls_of: Callable[[str, dict[str, int]], Calls],
    out: Tensor,
    rounds: int,
    seconds: float,
    peers: dict[str, Calls] | None = None,
) -> tuple[dict[str, list[float]], dict[str, float], dict[str, float]]:
    """Samples and medians in microseconds, and the difference of each output from the first kernel's, by label.

    calls_of: the calls of a kernel with changes to its configuration, which write `out`. peers: calls that are timed beside them.
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
        graphs.add(label, calls)
    graphs.settle(seconds)
    samples = graphs.samples(rounds)
    first = outputs[kernels[0]]
    return (
        {label: [round(time, 2) for time in times] for label, times in samples.items()},
        {label: round(median(times), 2) for label, times in samples.items()},
        {label: float((output - first).norm() / first.norm()) for label, output in outputs.items()},
    )
