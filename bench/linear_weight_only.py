"""Weight-only linear side by side on one GPU: our kernels, humming, cuBLAS in bf16, and kernels that only read the bytes.

    python -m gristmill.bench.linear_weight_only --out bench/results/h200/linear_weight_only.json

Same quantized weights for everyone, rotating over four times the 60 MB of L2; activations and outputs warm; each candidate
a CUDA graph of calls back to back, the graphs of one problem replayed in turn. Raw samples, clocks and versions are kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from gristmill.autotune.device import device_target
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.interpreter import load
from gristmill.quant import QuantTensor, pack, quantize

TABLE = ((4096, 4096), (28672, 4096), (4096, 14336), (7168, 2048), (24576, 1536), (7168, 16384))
MORE = ((2112, 7168), (5120, 27648), (8192, 8192), (10240, 8192), (1280, 8192), (3584, 8192), (6144, 4096), (18944, 3584),
        (3584, 18944), (57344, 8192))  # fmt: skip
COLD = 260 << 20
ROUNDS = 11
OURS = ("linear_w4a16_sm90", "linear_w4a16_tma_sm90")
DEVICE = "cuda:0"


@triton.jit
def _read(data, sink, count, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.int32)
    base = tl.program_id(0).to(tl.int64) * (BLOCK * PARTS)
    for part in tl.static_range(PARTS):
        at = base + part * BLOCK + tl.arange(0, BLOCK)
        total ^= tl.load(data + at, mask=at < count, other=0)
    found = tl.sum((total == 0x5A5A1234).to(tl.int32))
    tl.store(sink, found, mask=found == BLOCK)


class Graphs:
    """Candidates of one problem, replayed in turn."""

    def __init__(self) -> None:
        self.graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}

    def add(self, name: str, calls: list[Callable[[], Any]]) -> None:
        calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        graph.replay()
        self.graphs[name] = (graph, len(calls))

    def samples(self, rounds: int = ROUNDS) -> dict[str, list[float]]:
        """Microseconds a call, by name."""
        taken: dict[str, list[float]] = {name: [] for name in self.graphs}
        for _ in range(rounds):
            for name, (graph, calls) in self.graphs.items():
                before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                before.record()
                graph.replay()
                after.record()
                after.synchronize()
                taken[name].append(before.elapsed_time(after) * 1e3 / calls)
        return taken


def column_error(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> float:
    """|Δyₙ| / (‖x‖·‖wₙ‖/√K), RMS over all rows and columns (few rows say little about one column)."""
    scale = x.float().norm(dim=1, keepdim=True) * w.norm(dim=1) / w.shape[1] ** 0.5
    return float(((y.float() - x.float() @ w.T) / scale).square().mean().sqrt())


def floor_us(data: torch.Tensor, size: int) -> tuple[float, str]:
    """The fastest of 12 kernels that read `size` cold bytes."""
    count, copies = size // 4, max(2, COLD // size + 1)
    words, sink = data.view(torch.int32), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    step = -(-count // 64) * 64
    best = (float("inf"), "")
    for block in (1024, 2048, 4096):
        for parts in (1, 2):
            for warps in (4, 8):

                def call(i: int, block: int = block, parts: int = parts, warps: int = warps) -> None:
                    grid = (-(-count // (block * parts)),)
                    _read[grid](words[i % copies * step :], sink, count, BLOCK=block, PARTS=parts, num_warps=warps)

                graphs = Graphs()
                graphs.add("read", [lambda i=i: call(i) for i in range(max(copies, 20))])
                best = min(best, (statistics.median(graphs.samples(5)["read"]), f"{block}x{parts}, {warps} warps"))
    return best


def kernels(q: QuantTensor, n: int, k: int, humming: bool) -> dict[str, Any]:
    """Launchers with their packed weights, copied until they are cold."""
    registry, target = default_registry(), device_target(DEVICE, Policy())
    op = registry.op("linear")
    made: dict[str, Any] = {}
    for kernel in registry.all_kernels():
        if kernel.op != "linear" or kernel.name not in (*OURS, *(("linear_humming",) if humming else ())):
            continue
        tensors = pack(q, kernel.layouts[0]).tensors
        copies = max(2, COLD // sum(t.nbytes for t in tensors) + 1)
        made[kernel.name] = (op, kernel, target, load(kernel), [[t.clone() for t in tensors] for _ in range(copies)])
    return made


def our_calls(
    launcher: Any, config: dict[str, Any], x: Any, weights: list[Any], n: int, out: Any, space: Any = None
) -> list[Callable[[], Any]]:
    """Calls over all copies of a weight, at least 20 (6 where they are long). space: the workspace, one for all."""
    products = x.shape[0] * x.shape[1] * n

    def call(index: int) -> None:
        launcher(config, x, weights[index % len(weights)], None, None, False, n, space, out)

    return [partial(call, index) for index in range(6 if products > 2e10 else max(len(weights), 20))]


def workspace(kernel: Any, problem: Any, configs: list[Any]) -> Any:
    """Zeroed memory for the neediest of some configurations; None if none needs any."""
    size = max(kernel.workspace(problem, config).bytes for config in configs)
    return torch.zeros(size, dtype=torch.uint8, device=DEVICE) if size else None


def dense_calls(x: Any, dense: list[Any], out: Any) -> list[Callable[[], Any]]:
    """torch.mm with bf16 weights."""
    return [partial(torch.mm, x, dense[index % len(dense)].T, out=out) for index in range(20)]


def fastest(
    launcher: Any, options: list[Any], x: Any, weights: list[Any], n: int, out: Any, space: Any
) -> dict[str, Any]:
    """The fastest of some configurations."""
    trial = Graphs()
    for index, option in enumerate(options):
        trial.add(str(index), our_calls(launcher, dict(option), x, weights, n, out, space))
    medians = {name: statistics.median(v) for name, v in trial.samples(5).items()}
    return dict(options[int(min(medians, key=lambda name: medians[name]))])


def run_shape(
    n: int, k: int, ms: tuple[int, ...], humming: bool, data: torch.Tensor, tuned: bool
) -> list[dict[str, Any]]:
    """Rows of the result: one for each m."""
    q = quantize(torch.randn(n, k, device=DEVICE), "int4_g128")
    w = q.dequantize()
    floor, how = floor_us(data, n * k // 2 + n * k // 64)
    made = kernels(q, n, k, humming)
    dense = [w.bfloat16().clone() for _ in range(max(2, COLD // (n * k * 2) + 1))]
    rows = []
    for m in ms:
        x, graphs, errors, configs, refused = torch.randn(m, k, device=DEVICE).bfloat16(), Graphs(), {}, {}, {}
        out = torch.empty(m, n, dtype=torch.bfloat16, device=DEVICE)
        graphs.add("cublas_bf16", dense_calls(x, dense, out))
        for name, (op, kernel, target, launcher, weights) in made.items():
            problem = op.problem(f"m={m},n={n},k={k},w=int4_g128")
            if kernel.accepts(problem) is not None:
                continue
            config = dict(kernel.config(problem, target))
            options = list(kernel.space(problem, target))[:16] if tuned and kernel.space is not None else [config]
            space = workspace(kernel, problem, options)
            if len(options) > 1:
                config = fastest(launcher, options, x, weights, n, out, space)
            out.fill_(float("nan"))
            try:
                launcher(config, x, weights[0], None, None, False, n, space, out)
            except AssertionError as refusal:  # humming has no configuration for some shapes, and says so this way
                if name in OURS:
                    raise
                refused[name] = repr(refusal)
                continue
            configs[name] = config
            errors[name] = column_error(out, x, w)
            graphs.add(name, our_calls(launcher, config, x, weights, n, out, space))
        samples = graphs.samples()
        us = {name: statistics.median(v) for name, v in samples.items()}
        ours = min((us[name] for name in OURS if name in us), default=None)
        peers = {name: v for name, v in us.items() if name not in OURS}
        bar = max(min(peers.values()) / (1.5 if m <= 16 else 1.2 if m <= 128 else 1.0), floor / 0.85)
        rows.append({"n": n, "k": k, "m": m, "floor_us": floor, "floor_how": how, "us": us, "errors": errors, "configs": configs,
                     "refused": refused, "bar_us": bar, "met": ours is not None and ours <= bar, "samples": samples})  # fmt: skip
        shown = "  ".join(f"{name.removeprefix('linear_')} {v:.2f}" for name, v in us.items())
        print(
            f"{n}x{k} m={m}: floor {floor:.2f}  bar {bar:.2f}  {shown}  {'met' if rows[-1]['met'] else 'NOT met'}",
            flush=True,
        )
    return rows


def environment() -> dict[str, Any]:
    query = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    smi = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv"], capture_output=True, text=True, check=False
    )
    versions = {}
    for name in ("torch", "triton", "humming-kernels", "gristmill"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return {"nvidia_smi": smi.stdout, "versions": versions, "cuda": torch.version.cuda, "time": time.time()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--shapes", choices=("table", "more", "all"), default="all")
    parser.add_argument("--m", default="1,4,16,32,64", help="rows of x, by commas")
    parser.add_argument("--tuned", action="store_true", help="try 16 configurations of ours instead of the default one")
    given = parser.parse_args()
    try:
        version("humming-kernels")
        humming = True
    except PackageNotFoundError:
        humming = False
    before = environment()
    data = torch.randint(0, 1 << 30, ((2 * COLD + (512 << 20)) // 4,), dtype=torch.int32, device=DEVICE)
    shapes = TABLE if given.shapes == "table" else MORE if given.shapes == "more" else TABLE + MORE
    rows = []
    for n, k in shapes:
        rows += run_shape(n, k, tuple(int(m) for m in given.m.split(",")), humming, data, given.tuned)
        torch.cuda.empty_cache()
        given.out.parent.mkdir(parents=True, exist_ok=True)
        command = ["python -m gristmill.bench.linear_weight_only", *sys.argv[1:]]
        given.out.write_text(
            json.dumps({"command": " ".join(command), "before": before, "after": environment(), "rows": rows})
        )
    print(f"bars met: {sum(row['met'] for row in rows)} of {len(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
