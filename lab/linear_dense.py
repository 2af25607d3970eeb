"""Dense products of few rows on one GPU: every configuration of the kernel for them, beside torch's product.

    python -m lab.linear_dense --out table.json --store times.json

Weights come in copies that amount to four times the L2. A candidate is a CUDA graph of calls that depend on each other; candidates of a problem
are replayed in turn, and the fastest few configurations run again with the default one and torch's. Errors are relative to those of
a sum in float64, as the operation defines them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from typing import Any

import torch

from gristmill.autotune.device import device_target
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store
from gristmill.kernels.load import load
from lab.gpu_graphs import DEVICE, Call, Graphs, add_time, cold_count, floor_us
from lab.kernel_timing import Run, linear_options

OURS = "linear_dense_decode_sm90"
SHAPES = (
    "4096x1024,1024x2048,6144x1024+silu_mul,1024x3072,151936x1024,"  # Qwen3-0.6B
    "6144x4096,4096x4096,28672x4096+silu_mul,4096x14336,128256x4096,"  # Llama-3-8B
    "2112x7168,256x7168,1536x512"  # DeepSeek-V3's latents, its router, and a small one
)


def problem_of(shape: str, m: int) -> Problem:
    """``NxK`` or ``NxK+silu_mul`` at m rows, in bfloat16."""
    size, _, epilogue = shape.partition("+")
    n, _, k = size.partition("x")
    return (
        default_registry()
        .op("linear")
        .problem(f"m={m},n={n},k={k},x=bf16,w=bf16,epilogue={epilogue or 'none'}")
    )


def normal(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, device=DEVICE, dtype=torch.bfloat16)


class Weights:
    """Cold copies of a weight, and what calls by the launchers' arguments need."""

    def __init__(self, problem: Problem) -> None:
        self.n, self.k = problem.integer("n"), problem.integer("k")
        first = normal(self.n, self.k, 0)
        count = 1 if DEVICE == "cpu" else cold_count(first.nbytes)
        self.copies = [first, *(first.clone() for _ in range(count - 1))]
        self.calls = max(4, len(self.copies))


def measure(
    weights: Weights, problem: Problem, kernels: list[Kernel], rounds: int, store: Store
) -> dict[str, Any]:
    """One row of the result file."""
    target = device_target(DEVICE, Policy())
    m, gated = problem.integer("m"), "silu_mul" in problem.text("epilogue")
    x = normal(m, weights.k, 1)
    out = torch.empty(m, weights.n // 2 if gated else weights.n, device=DEVICE, dtype=torch.bfloat16)
    exact = x.double() @ weights.copies[0].double().T
    if gated:
        exact = torch.nn.functional.silu(exact[:, : weights.n // 2]) * exact[:, weights.n // 2 :]

    def calls(kernel: Kernel, config: Config) -> list[Call]:
        run, call, copies = load(kernel), default_registry().op("linear").Call, weights.copies
        return [
            partial(
                run, config, call(x, [copies[i % len(copies)]], None, None, gated, weights.n, None, out=out)
            )
            for i in range(weights.calls)
        ]

    def error() -> float:
        return float(((out.double() - exact).norm() / exact.norm()).item())

    configs: dict[str, tuple[Kernel, Config]] = {}
    trial: dict[str, float] = {}
    for kernel in kernels:
        default = kernel.config(problem, target)
        configs[kernel.name] = kernel, default
        if kernel.name != OURS or kernel.space is None:
            continue
        graphs, space = Graphs(), list(kernel.space(problem, target))
        for place, config in enumerate(space):
            graphs.add(str(place), calls(kernel, config))
        trial = {name: min(times) for name, times in graphs.samples(3).items()}
        for rank, name in enumerate(sorted(trial, key=lambda name: trial[name])[:3]):
            configs[f"{kernel.name}/{rank}"] = kernel, space[int(name)]
    final, errors = Graphs(), {}
    for name, (kernel, config) in configs.items():
        out.fill_(float("nan"))
        calls(kernel, config)[0]()
        errors[name] = error()
        final.add(name, calls(kernel, config))
    final.settle(0.02)
    samples = final.samples(rounds)
    us = {name: statistics.median(times) for name, times in samples.items()}
    for kernel in kernels:
        best = min((name for name in us if name.split("/")[0] == kernel.name), key=lambda name: us[name])
        add_time(store, problem, kernel.name, configs[best][1], us[best])
    return {
        "problem": str(problem),
        "us": us,
        "floor_us": 0.0 if DEVICE == "cpu" else floor_us(weights.copies[0].nbytes)[0],
        "errors": errors,
        "configs": {name: config for name, (_, config) in configs.items()},
        "trial": {
            "of": ",".join(space[0]),
            "us": {",".join(map(str, space[int(name)].values())): time for name, time in trial.items()},
        }
        if trial
        else {},
        "samples": samples,
    }


def arguments() -> argparse.ArgumentParser:
    parser = linear_options(__doc__, f"{OURS},linear_torch", "1,2,4,8,16")
    parser.add_argument("--shapes", default=SHAPES, help="NxK or NxK+silu_mul, by commas")
    parser.set_defaults(rounds=9)
    return parser


def main() -> int:
    options = arguments().parse_args()
    run, registry = Run("linear_dense", options.out, options.store), default_registry()
    kernels = [registry.kernel("linear", name) for name in options.kernels.split(",")]
    for shape in options.shapes.split(","):
        if run.seconds > options.seconds:
            continue
        weights = Weights(problem_of(shape, 1))
        for m in options.m.split(","):
            row = measure(weights, problem_of(shape, int(m)), kernels, options.rounds, run.store)
            run.rows.append(row)
            times = "  ".join(f"{name} {us:.2f}" for name, us in row["us"].items())
            worst = max(row["errors"].values())
            print(f"{row['problem']}: floor {row['floor_us']:.2f}  {times}  error {worst:.1e}", flush=True)
        run.save()
    print(f"{run.seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
