"""Weight-only linear on one GPU: every registered kernel that can run, including peers, next to cuBLAS in bf16 and the read floor.

    python -m lab.linear_weight_only --schemes int4_g128,nvfp4 --shapes table --m 1,16,64,256,1024 --out table.json

All candidates use the same quantized weight, in copies that amount to four times the L2; activations and outputs are warm. A candidate is a
CUDA graph of calls. The candidates of a problem are replayed in turn, back to back and, with ``--isolated``, with a link between calls that
makes each call's x depend on the previous output. ``--tuned`` tries every configuration of a kernel and keeps the fastest four, with
``--isolated`` also the fastest two isolated ones, and several choices of humming's heuristics; ``--times`` writes what they all took.
Because clocks vary, medians of different candidates may come from different clocks: rows therefore also have ratios to the best peer, round
by round. The result file is written after each shape.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gristmill.autotune.device import device_target
from gristmill.autotune.resolve import confirmed_build
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store
from gristmill.kernels.load import load
from gristmill.quant import pack, quantize
from gristmill.quant.packed import LayoutError
from lab.gpu_graphs import (
    DEVICE,
    Call,
    Graphs,
    add_time,
    cold_copies,
    column_error,
    floor_us,
    links,
)
from lab.humming_choices import humming_choices
from lab.kernel_timing import Run, linear_options
from lab.marlin import MARLIN, marlin_call, marlin_packed, marlin_refusal
from lab.result import fastest_per_kernel, write_result

TABLE = ((4096, 4096), (28672, 4096), (4096, 14336), (7168, 2048), (24576, 1536), (7168, 16384))
MORE = (
    (2112, 7168),
    (5120, 27648),
    (8192, 8192),
    (10240, 8192),
    (1280, 8192),
    (3584, 8192),
    (6144, 4096),
    (18944, 3584),
    (3584, 18944),
    (57344, 8192),
)
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LIMIT = {"bf16": 6e-3, "fp16": 2e-3}
"""Candidates with a larger error per column are not timed."""
CUBLAS = "cublas"
SLOW = ("linear_dequant_torch",)
"""Excluded: the last fallback, hundreds of times slower than the others."""
SLACK = {"mxfp4": 1.12, "nvfp4": 1.12}
"""The factor on the target for formats with more bytes than int4_g128."""
KEPT, KEPT_APART = 4, 2
"""Number of configurations of a kernel in the final: the fastest back to back, and the fastest isolated."""


def calls_of(kernel_call: Any, x: torch.Tensor, n: int, copies: int) -> list[Call]:
    """Calls over all copies of a weight, at least 20 (6 or 3 if they are long)."""
    products = x.shape[0] * x.shape[1] * n
    count = 3 if products > 2e11 else 6 if products > 2e10 else max(copies, 20)
    return [partial(kernel_call, index) for index in range(count)]


class Shape:
    """One weight [n, k] and its candidates."""

    def __init__(self, scheme: str, n: int, k: int, options: argparse.Namespace) -> None:
        self.scheme, self.n, self.k, self.options = scheme, n, k, options
        self.registry, self.target = default_registry(), device_target(DEVICE, Policy())
        self.op, self.build = self.registry.op("linear"), confirmed_build(self.registry, self.target)
        names = options.kernels.split(",") if options.kernels else []
        self.kernels = [
            kernel
            for kernel in self.registry.kernels_of("linear")
            if kernel.name not in SLOW
            and (kernel.name in names if names else True)
            and not kernel.requires.check_hardware(self.target, self.build)
            and not kernel.requires.check_build(self.target, self.build)
        ]
        self.q = quantize(torch.randn(n, k, device=DEVICE), scheme)
        self.wide = self.q.dequantize()
        self.floor, self.how = (0.0, "not measured") if options.alone else floor_us(self.q.nbytes)
        self.packed: dict[str, list[list[torch.Tensor]]] = {}
        self.dense: list[torch.Tensor] = []
        self.marlin: dict[torch.dtype, list[list[torch.Tensor]]] = {}
        self.times: list[dict[str, Any]] = []

    def weights(self, kernel: Kernel) -> list[list[torch.Tensor]]:
        """Cold copies in a layout of the kernel. LayoutError if none of its layouts takes this weight."""
        names = [name for name in kernel.layouts if self.registry.layout(name).accepts(self.scheme)]
        if not names:
            raise LayoutError(" or ".join(kernel.layouts), f"no layout of {kernel.name} takes {self.scheme}")
        if names[0] not in self.packed:
            self.packed[names[0]] = cold_copies(pack(self.q, names[0]).tensors)
        return self.packed[names[0]]

    def row(self, m: int, x_name: str, store: Store) -> dict[str, Any]:
        """Measure M rows of x; the times of registered kernels go to `store`."""
        dtype = TYPES[x_name]
        problem = self.op.problem(f"m={m},n={self.n},k={self.k},x={x_name},w={self.scheme}")
        candidates = Row(self, problem, torch.randn(m, self.k, device=DEVICE).to(dtype), LIMIT[x_name])
        if not self.options.alone:
            if not self.dense or self.dense[0].dtype != dtype:
                self.dense = [t[0] for t in cold_copies([self.wide.to(dtype)])]
            candidates.add(
                CUBLAS,
                lambda i: torch.mm(candidates.x, self.dense[i % len(self.dense)].T, out=candidates.out),
                len(self.dense),
            )
        if self.options.marlin:
            candidates.marlin()
        for kernel in self.kernels:
            candidates.kernel(kernel)
        result = candidates.timed()
        for name, config in candidates.configs.items():
            add_time(store, problem, name.split("/")[0], config, result["us"][name])
        return {
            "scheme": self.scheme,
            "n": self.n,
            "k": self.k,
            "m": m,
            "x": x_name,
            "floor_us": self.floor,
            "floor_how": self.how,
            **result,
        }


class Row:
    """The candidates of one problem."""

    def __init__(self, shape: Shape, problem: Problem, x: torch.Tensor, limit: float) -> None:
        self.shape, self.problem, self.x, self.limit = shape, problem, x, limit
        self.out = torch.empty(x.shape[0], shape.n, dtype=x.dtype, device=DEVICE)
        self.graphs, self.apart = Graphs(), Graphs()
        self.configs: dict[str, dict[str, Any]] = {}
        self.ours: set[str] = set()
        self.errors: dict[str, float] = {}
        self.refused: dict[str, str] = {}

    def add(self, name: str, call: Any, copies: int) -> bool:
        """Add `call(index)` as a candidate if its result is correct."""
        self.out.fill_(float("nan"))
        call(0)
        self.errors[name] = column_error(self.out, self.x, self.shape.wide)
        if not self.errors[name] < self.limit:
            self.refused[name] = f"wrong: error {self.errors[name]:.2g}"
            return False
        calls = calls_of(call, self.x, self.shape.n, copies)
        self.graphs.add(name, calls)
        if self.shape.options.isolated:
            self.apart.add(name, links(self.x, self.out, calls))
        return True

    def marlin(self) -> None:
        """vLLM's Marlin, where it takes the weight."""
        shape, dtype = self.shape, self.x.dtype
        if reason := marlin_refusal(shape.scheme):
            self.refused[MARLIN] = reason
            return
        if dtype not in shape.marlin:
            shape.marlin[dtype] = cold_copies(marlin_packed(shape.q, dtype))
        packed = shape.marlin[dtype]
        call = marlin_call(packed, self.x, self.out, shape.target.multiprocessors or 132)
        self.add(MARLIN, call, len(packed))

    def kernel(self, kernel: Kernel) -> None:
        """A registered kernel at its default configuration, or at the fastest few."""
        if reason := kernel.accepts(self.problem):
            self.refused[kernel.name] = reason
            return
        try:
            weights = self.shape.weights(kernel)
            if kernel.provider == "humming" and self.shape.options.tuned:
                for name, call in humming_choices(weights, self.x, self.out).items():
                    self.add(name, call, len(weights))
                return
            for place, (config, call) in enumerate(self._configs(kernel, weights)):
                name = f"{kernel.name}/{place}" if self.shape.options.tuned else kernel.name
                if self.add(name, call, len(weights)):
                    self.configs[name] = config
                    if kernel.provider == "gristmill":
                        self.ours.add(name)
                elif kernel.provider == "gristmill":
                    raise RuntimeError(
                        f"{kernel.name} at {config} is wrong for {self.problem}: {self.refused[name]}"
                    )
        except (
            LayoutError,
            AssertionError,
        ) as refusal:  # humming asserts if it has no configuration
            self.refused[kernel.name] = repr(refusal)

    def _configs(self, kernel: Kernel, weights: list[list[torch.Tensor]]) -> list[tuple[dict[str, Any], Any]]:
        """The configurations to time, each with its call: the default one, or the fastest few by the better of two replays."""
        launcher, options = load(kernel), [dict(kernel.config(self.problem, self.shape.target))]
        if self.shape.options.tuned and kernel.space is not None:
            options += [
                dict(c) for c in kernel.space(self.problem, self.shape.target) if dict(c) != options[0]
            ]
            options = options[: self.shape.options.tried]
        size = max(kernel.workspace(self.problem, option).bytes for option in options)
        space = torch.zeros(size, dtype=torch.uint8, device=DEVICE) if size else None

        def call(config: dict[str, Any], index: int) -> None:
            launcher(
                config,
                default_registry()
                .op("linear")
                .Call(
                    self.x,
                    weights[index % len(weights)],
                    None,
                    None,
                    False,
                    self.shape.n,
                    space,
                    out=self.out,
                ),
            )

        made = [(option, partial(call, option)) for option in options]
        if len(made) > KEPT or self.shape.options.times:
            calls = [calls_of(sample, self.x, self.shape.n, min(len(weights), 8)) for _, sample in made]
            us = trial(calls)
            self.shape.times += [
                {"problem": str(self.problem), "kernel": kernel.name, "config": option, "us": time}
                for option, time in zip(options, us, strict=True)
            ]
            finalists = fastest(us)[:KEPT]
            if self.shape.options.isolated:
                apart = trial([links(self.x, self.out, sample) for sample in calls])
                finalists += fastest(apart)[:KEPT_APART]
            made = [made[place] for place in dict.fromkeys(finalists)]
        return made

    def timed(self) -> dict[str, Any]:
        """The row: samples and the figures derived from them."""
        if not self.graphs.timed:
            raise RuntimeError(f"no registered kernel runs {self.problem}: {self.refused}")
        rounds = self.shape.options.rounds
        if self.x.shape[0] >= 1024:
            self.graphs.settle(0.3)
        samples = self.graphs.samples(rounds)
        result: dict[str, Any] = {
            "us": {name: statistics.median(v) for name, v in samples.items()},
            "errors": self.errors,
            "configs": self.configs,
            "refused": self.refused,
            "samples": samples,
        }
        if self.shape.options.isolated:
            self.apart.add("links", links(self.x, self.out))
            result["isolated_samples"] = apart = self.apart.samples(rounds)
            link = statistics.median(apart["links"])
            alone = {name: [sample - link for sample in v] for name, v in apart.items() if name != "links"}
            result["isolated_us"] = {name: statistics.median(v) for name, v in alone.items()}
            judgement = verdict(alone, self.ours, self.x.shape[0], self.shape.scheme, self.shape.floor)
            result |= {f"isolated_{name}": value for name, value in judgement.items()}
        return result | verdict(samples, self.ours, self.x.shape[0], self.shape.scheme, self.shape.floor)


def trial(options: list[list[Call]]) -> list[float]:
    """Microseconds per call of each list of calls, the better of two replays."""
    graphs = Graphs()
    for place, calls in enumerate(options):
        graphs.add(str(place), calls)
    return [min(samples) for samples in graphs.samples(2).values()]


def fastest(us: list[float]) -> list[int]:
    """Indices of times, the shortest first."""
    return sorted(range(len(us)), key=us.__getitem__)


def verdict(
    samples: dict[str, list[float]], ours: set[str], m: int, scheme: str, floor: float
) -> dict[str, Any]:
    """Our best kernel against the best peer. bar_us: the target, from the peer's time and the floor; over_peer: our time over the peer's
    round by round, as (second least, median, second greatest), which decides. None if one of the two is missing.
    """
    us = {name: statistics.median(v) for name, v in samples.items()}
    peers = [name for name in us if name not in ours]
    if not peers or not ours:
        return {"bar_us": None, "met": None}
    best, peer = min(ours, key=lambda name: us[name]), min(peers, key=lambda name: us[name])
    share = (1.5 if m <= 16 else 1.2 if m <= 128 else 1.0) / SLACK.get(scheme, 1.0)
    ratios = sorted(mine / theirs for mine, theirs in zip(samples[best], samples[peer], strict=True))
    bar = max(us[peer] / share, floor / 0.85)
    low, high = ratios[min(1, len(ratios) - 1)], ratios[max(0, len(ratios) - 2)]
    ratio = statistics.median(ratios)
    return {
        "best": best,
        "peer": peer,
        "over_peer": [low, ratio, high],
        "bar_us": bar,
        "met": ratio * share <= 1 or us[best] <= floor / 0.85,
    }


def shapes_of(text: str) -> tuple[tuple[int, ...], ...]:
    """``table``, ``more``, ``all``, or comma-separated NxK."""
    sets = {"table": TABLE, "more": MORE, "all": TABLE + MORE}
    return sets.get(text) or tuple(tuple(int(v) for v in shape.split("x")) for shape in text.split(","))


def line(row: dict[str, Any]) -> str:
    """A row on the screen."""
    shown = "  ".join(
        f"{name.removeprefix('linear_')} {us:.2f}"
        for name, us in sorted(row["us"].items(), key=lambda i: i[1])
    )
    met = "" if row["met"] is None else f"bar {row['bar_us']:.2f} {'met' if row['met'] else 'NOT met'}  "
    if row.get("isolated_met") is not None:
        met += f"isolated {row['isolated_bar_us']:.2f} {'met' if row['isolated_met'] else 'NOT met'}  "
    return f"{row['scheme']} {row['x']} {row['n']}x{row['k']} m={row['m']}: {met}floor {row['floor_us']:.2f}  {shown}"


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = linear_options(__doc__, "", "1,4,16,32,64,128,256,1024,4096")
    parser.add_argument("--schemes", default="int4_g128,nvfp4,mxfp4", help="by commas")
    parser.add_argument("--x", default="bf16", help="comma-separated dtypes of activations")
    parser.add_argument("--shapes", default="table", help="table, more, all, or comma-separated NxK")
    parser.add_argument(
        "--tuned",
        action="store_true",
        help="every configuration of a kernel's space instead of the default one",
    )
    parser.add_argument(
        "--tried",
        type=int,
        default=1000,
        help="with --tuned: the maximum number of configurations, in the order of the kernel's space",
    )
    parser.add_argument(
        "--times", type=Path, help="with --tuned: where what every configuration took goes, as JSON"
    )
    parser.add_argument("--isolated", action="store_true", help="also time isolated calls")
    parser.add_argument(
        "--marlin", action="store_true", help="beside vLLM's Marlin, which has to be installed"
    )
    parser.add_argument("--alone", action="store_true", help="without cuBLAS and the floor")
    return parser


def main() -> int:
    options = arguments().parse_args()
    run = Run("linear_weight_only", options.out, options.store)
    times: list[dict[str, Any]] = []
    for scheme in options.schemes.split(","):
        for n, k in shapes_of(options.shapes):
            if run.seconds > options.seconds:
                continue
            shape = Shape(scheme, n, k, options)
            for x in options.x.split(","):
                for m in options.m.split(","):
                    run.rows.append(shape.row(int(m), x, run.store))
                    print(line(run.rows[-1]), flush=True)
            times += shape.times
            if options.times:
                write_result(options.times, {"command": run.command, "rows": times})
            del shape
            torch.cuda.empty_cache()
            run.save(fastest_per_kernel)
    judged = [row["met"] for row in run.rows if row["met"] is not None]
    print(f"bars met: {sum(judged)} of {len(judged)}; {run.seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
