"""Linear with 8-bit weights and activations on one GPU: products of quantized x, what quantizes it, and both, beside torch's products.

    python -m lab.linear_w8a8 --out table.json --store times.json

Weights come in copies that amount to four times the L2. A candidate is a CUDA graph of calls; candidates of a problem are replayed in
turn. ``product NAME`` has x quantized already, as the goals have it; ``whole NAME`` is the operation. Every configuration of a kernel
is tried, and the fastest few are in the final. Errors are those of the worst column and the worst row against float64 on the operands
as stored. The result
file is written after each weight.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gristmill.autotune.device import device_target
from gristmill.autotune.resolve import confirmed_build
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.store import Store
from gristmill.kernels.linear.w8a8_sm90 import _launch
from gristmill.kernels.linear.w8a8_sm90.shapes import operands_of, workspace_bytes
from gristmill.quant import QuantTensor, pack
from gristmill.quant.activations import QuantAct, quantize_activation
from lab.gpu_graphs import DEVICE, Call, Graphs, add_time, cold_count
from lab.kernel_timing import Run, linear_options

SHAPES = "7168x2048,4096x7168,24576x1536"
SCHEMES = "fp8_block.fp8_g128,fp8_ch.fp8_token,int8_ch.int8_token"
OURS = "linear_w8a8_sm90"
GOALS = {
    (7168, 2048): (
        (1, 5.7, 5.7),
        (16, 5.8, 6.0),
        (64, 6.0, 6.3),
        (256, 7.5, 8.3),
        (1024, 23.5, 25),
        (4096, 87, 92),
    ),
    (4096, 7168): (
        (1, 9.3, 9.3),
        (16, 9.4, 9.6),
        (64, 9.8, 10.2),
        (256, 13, 14.5),
        (1024, 43.5, 47),
        (4096, 178, 190),
    ),
    (24576, 1536): (
        (1, 11.4, 11.4),
        (16, 11.8, 12),
        (64, 12.6, 13),
        (256, 16, 18),
        (1024, 60, 63),
        (4096, 227, 250),
    ),
}
"""Microseconds of the product by shape: M, with scales per token and channel, with blocks."""
LIMIT = 6e-3
CHECKED_ROWS = 256


def random_weight(scheme: QuantScheme, n: int, k: int, seed: int) -> QuantTensor:
    """Codes and scales drawn on the device: quantizing that many weights would take longer than measuring them."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    if scheme.is_integer:
        codes = torch.randint(1, 256, (n, k), dtype=torch.uint8, device=DEVICE, generator=generator)
    else:
        values = torch.randn(n, k, device=DEVICE, generator=generator) * 60
        codes = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    shape = scheme.scale_shape(n, k)
    scales = torch.rand(shape or (1,), device=DEVICE, generator=generator) * 1e-3 + 1e-4
    weights = scheme.without_activation
    if shape is None:
        return QuantTensor(codes, None, (n, k), weights, global_scale=scales)
    return QuantTensor(codes, scales, (n, k), weights)


def errors(y: Tensor, x: Tensor, w: Tensor) -> tuple[float, float]:
    """RMS of |Δy| / (‖x‖·‖wₙ‖/√K) in the worst column and the worst row, all float64."""
    size = x.norm(dim=1, keepdim=True) * w.norm(dim=1) / w.shape[1] ** 0.5
    delta = ((y.double() - x @ w.T) / size).square().nan_to_num(nan=1e9)
    return float(delta.mean(0).sqrt().max()), float(delta.mean(1).sqrt().max())


class Problem:
    """One weight [n, k] in cold copies, and M rows of x, quantized."""

    def __init__(self, scheme: str, n: int, k: int) -> None:
        self.scheme, self.n, self.k = QuantScheme.parse(scheme), n, k
        self.operands = operands_of(scheme)
        self.registry, self.target = default_registry(), device_target(DEVICE, Policy())
        self.op, self.build = self.registry.op("linear"), confirmed_build(self.registry, self.target)
        weights = [random_weight(self.scheme, n, k, seed) for seed in range(cold_count(n * k))]
        self.wide = weights[0].dequantize().double()
        self.packed = [pack(weight, "plain_v1").tensors for weight in weights]

    def rows(self, m: int) -> None:
        """Draws x."""
        self.m, self.x = m, torch.randn(m, self.k, device=DEVICE).bfloat16()
        self.out = torch.empty(m, self.n, dtype=torch.bfloat16, device=DEVICE)
        self.act = quantize_activation(self.x, str(self.scheme.activation))
        checked = torch.linspace(0, m - 1, min(m, CHECKED_ROWS)).long().unique()
        self.checked = checked.to(DEVICE)
        self.values = self.act.dequantize(torch.float64)[self.checked]
        self.room = torch.empty(workspace_bytes(self.operands, m, self.k), dtype=torch.uint8, device=DEVICE)
        self.problem = self.op.problem(f"m={m},n={self.n},k={self.k},w={self.scheme}")

    @property
    def calls(self) -> int:
        """Calls of a graph: all copies, or fewer long ones."""
        return 6 if self.m * self.n * self.k > 5e9 else max(len(self.packed), 20)

    def kernels(self, names: list[str]) -> list[Kernel]:
        """The registered kernels of these names that run this problem here."""
        return [
            kernel
            for kernel in self.registry.kernels_of("linear")
            if kernel.name in names and not kernel.why_not(self.problem, self.target, self.build)
        ]

    def whole(self, kernel: Kernel, config: Config) -> Callable[[int], Any]:
        """The operation by a kernel, over copy i of the weight."""
        launch = kernel.load()
        return lambda i: launch(
            config,
            default_registry()
            .op("linear")
            .Call(
                self.x,
                self.packed[i % len(self.packed)],
                None,
                None,
                False,
                self.n,
                self.room,
                out=self.out,
            ),
        )

    def quantizer(self) -> Callable[[int], Any]:
        """Quantization of x alone."""
        return lambda i: _launch.quantize_rows(self.operands, self.x, self.m, self.k, self.room, 0, _stream())

    def product(self, config: Config) -> Callable[[int], Any]:
        """The product alone, by linear_w8a8_sm90."""
        quantized = _launch.quantize_rows(self.operands, self.x, self.m, self.k, self.room, 0, _stream())
        torch.cuda.synchronize()
        return lambda i: _launch.multiply(
            config, quantized, self.k, self.packed[i % len(self.packed)], None, None, self.out, _stream()
        )


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def torch_products(problem: Problem) -> dict[str, Callable[[int], Any]]:
    """torch's products of the same operands, x quantized already."""
    act: QuantAct = problem.act
    values, scales = act.values.to(DEVICE), act.scales.to(DEVICE)
    if problem.operands.sums:
        signed = [(tensors[0] ^ 128).view(torch.int8).T for tensors in problem.packed]
        return {"product torch._int_mm, no scales": lambda i: torch._int_mm(values, signed[i % len(signed)])}

    def scaled(i: int, x_scales: Tensor, fast: bool) -> None:
        codes, w_scales = problem.packed[i % len(problem.packed)][:2]
        torch._scaled_mm(
            values,
            codes.view(torch.float8_e4m3fn).T,
            scale_a=x_scales,
            scale_b=w_scales.T,
            out_dtype=problem.out.dtype,
            use_fast_accum=fast,
            out=problem.out,
        )

    if problem.operands.blocks:
        outer = scales.T.contiguous().T  # as cuBLASLt takes scales of 1 x 128
        return {"product torch._scaled_mm": partial(scaled, x_scales=outer, fast=False)}
    return {
        "product torch._scaled_mm": partial(scaled, x_scales=scales, fast=False),
        "product torch._scaled_mm, fast sums": partial(scaled, x_scales=scales, fast=True),
    }


class Row:
    """The candidates of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.graphs = problem, Graphs()
        self.configs: dict[str, Config] = {}
        self.errors: dict[str, tuple[float, float]] = {}
        self.refused: dict[str, str] = {}

    def add(self, name: str, call: Callable[[int], Any], *, judged: bool = True) -> None:
        """Add `call(i)` as a candidate if it runs and its result is correct."""
        problem = self.problem
        problem.out.fill_(float("nan"))
        try:
            call(0)
        except (RuntimeError, ValueError) as error:
            self.refused[name] = str(error).splitlines()[0][:200]
            return
        if judged:
            self.errors[name] = errors(problem.out[problem.checked], problem.values, problem.wide)
            if not max(self.errors[name]) < LIMIT * (1 + 4 / problem.m**0.5):
                self.refused[name] = f"wrong: errors {self.errors[name]}"
                if "fast" not in name:  # which is timed nevertheless: it is what others run
                    return
        self.graphs.add(name, calls_of(call, problem.calls))

    def fastest(self, configs: list[Config], kept: int) -> list[Config]:
        """The configurations whose products are the fastest."""
        trial = Graphs()
        for place, config in enumerate(configs):
            trial.add(str(place), calls_of(self.problem.product(config), self.problem.calls))
        us = {int(name): min(samples) for name, samples in trial.samples(3).items()}
        return [configs[place] for place in sorted(us, key=lambda place: us[place])[:kept]]


def calls_of(call: Callable[[int], Any], count: int) -> list[Call]:
    """`count` calls over successive copies."""
    return [partial(call, i) for i in range(count)]


def measure(
    problem: Problem, m: int, names: list[str], rounds: int, kept: int, store: Store
) -> dict[str, Any]:
    """One row of the result file; `kept` configurations of linear_w8a8_sm90, and its default, are in the final."""
    problem.rows(m)
    row = Row(problem)
    for kernel in problem.kernels(names):
        configs = [kernel.config(problem.problem, problem.target)]
        if kernel.name == OURS and kernel.space is not None:
            space = list(kernel.space(problem.problem, problem.target))
            configs = list({str(c): c for c in (*row.fastest(space, kept), configs[0])}.values())
            row.add("quantize", problem.quantizer(), judged=False)
        for place, config in enumerate(configs):
            label = kernel.name if place == 0 else f"{kernel.name}/{place}"
            row.configs[label] = config
            row.add(f"whole {label}", problem.whole(kernel, config))
            if kernel.name == OURS:
                row.add(f"product {label}", problem.product(config))
    if DEVICE != "cpu":
        for name, call in torch_products(problem).items():
            row.add(name, call, judged="no scales" not in name)
    row.graphs.settle(0.05)
    samples = row.graphs.samples(rounds)
    us = {name: statistics.median(v) for name, v in samples.items()}
    for label, config in row.configs.items():
        if f"whole {label}" in us:
            add_time(store, problem.problem, label.split("/")[0], config, us[f"whole {label}"])
    goals = {m: goal[problem.operands.blocks] for m, *goal in GOALS.get((problem.n, problem.k), ())}
    return {
        "scheme": str(problem.scheme),
        "n": problem.n,
        "k": problem.k,
        "m": m,
        "goal_us": goals.get(m),
        "us": us,
        "errors": row.errors,
        "configs": row.configs,
        "refused": row.refused,
        "samples": samples,
    }


def tile(config: Config | None) -> str:
    """The instance of a configuration, CTAs of a tile and of a multiprocessor."""
    if not config or "rows" not in config:
        return ""
    return " ({rows}x{columns}x{plain}, {split}, {ctas})".format(**config)


def line(row: dict[str, Any]) -> str:
    """A row on the screen."""
    configs = row["configs"]
    shown = "  ".join(
        f"{name}{tile(configs.get(name.partition(' ')[2]))} {us:.2f}"
        for name, us in sorted(row["us"].items(), key=lambda i: i[1])
    )
    wrong = f"  refused {row['refused']}" if row["refused"] else ""
    return f"{row['scheme']} {row['n']}x{row['k']} m={row['m']}: goal {row['goal_us']}  {shown}{wrong}"


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = linear_options(__doc__, f"{OURS},linear_scaled_mm_torch", "1,16,64,256,1024,4096")
    parser.add_argument("--schemes", default=SCHEMES, help="by commas")
    parser.add_argument("--shapes", default=SHAPES, help="NxK by commas")
    parser.add_argument(
        "--kept", type=int, default=2, help="configurations of ours in the final, the fastest ones"
    )
    return parser


def main() -> int:
    options = arguments().parse_args()
    run = Run("linear_w8a8", options.out, options.store)
    for scheme in options.schemes.split(","):
        for shape in options.shapes.split(","):
            if run.seconds > options.seconds:
                continue
            problem = Problem(scheme, *(int(v) for v in shape.split("x")))
            for m in options.m.split(","):
                run.rows.append(
                    measure(
                        problem, int(m), options.kernels.split(","), options.rounds, options.kept, run.store
                    )
                )
                print(line(run.rows[-1]), flush=True)
            run.save()
            del problem
    print(f"{run.seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
