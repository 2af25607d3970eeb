"""Weight-only linear on one GPU, every scheme: our kernels tuned, beside humming, cuBLAS in bf16 and the read floor.

    python -m gristmill.bench.weight_only_sweep --schemes nvfp4 --shapes table --m 1,4,16 --out nvfp4.json --tuned tuned.json

The harness is that of `linear_weight_only`: cold weights, graphs of calls back to back, candidates replayed in turn. Of our kernels
every configuration of their space is tried first and the fastest few again; humming takes the fastest of what its own heuristics
give for the M at hand, and up to 64 rows for some others. ``--tuned`` also writes our times as a store, such as those in autotune/tuned.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from gristmill.autotune.device import device_target
from gristmill.autotune.resolve import confirmed_build
from gristmill.autotune.store import dump
from gristmill.bench.linear_weight_only import (
    COLD,
    DEVICE,
    MORE,
    TABLE,
    Graphs,
    column_error,
    dense_calls,
    environment,
    floor_us,
    our_calls,
    workspace,
)
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store, Timing, target_key
from gristmill.kernels.interpreter import load
from gristmill.quant import QuantTensor, pack, quantize

LIMIT = 6e-3


def cold_copies(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Copies of a packed weight, enough that each is out of the cache when its turn comes again."""
    count = max(2, COLD // sum(t.nbytes for t in tensors) + 1)
    return [[t.clone() for t in tensors] for _ in range(count)]


def fastest(launcher: Any, options: list[Any], x: Any, weights: list[Any], n: int, out: Any, space: Any) -> list[Any]:
    """The four fastest configurations, by the better of two replays."""
    found = []
    for option in options:
        trial = Graphs()
        trial.add("", our_calls(launcher, option, x, weights, n, out, space)[: max(len(weights), 8)])
        found.append((min(trial.samples(2)[""]), len(found)))
    return [options[index] for _, index in sorted(found)[:4]]


def humming_calls(x: Any, weights: list[Any], out: Any, tuning: str) -> list[Any]:
    """Calls of humming at one of its tuning configurations."""
    from humming.ops import humming_gemm

    def call(index: int) -> None:
        w = weights[index % len(weights)]
        given = [t if t.numel() else None for t in w[:4]]
        humming_gemm(
            layer_config=text, inputs=x, weight=given[0], weight_scale=given[1], zero_point=given[2], weight_scale_2=given[3],
            outputs=out, locks=w[4], tuning_config=tuning,
        )  # fmt: skip

    text = weights[0][5].numpy().tobytes().decode()
    return [partial(call, index) for index in range(max(len(weights), 20))]


def humming_options(weights: list[Any], m: int) -> dict[str, str]:
    """Distinct configurations of humming's heuristics for this M, and where its choice is not the best for a few others, by M."""
    from humming.tune import get_heuristics_config

    layer = json.loads(weights[0][5].numpy().tobytes().decode())
    layer.pop("sublayer_name", None)
    found: dict[str, str] = {}
    more = (1, 16, 32, 64) if m <= 16 else (32, 64) if m <= 64 else ()
    for rows in dict.fromkeys((m, *more)):
        try:
            text = json.dumps(get_heuristics_config(layer, shape_m=rows, device=0), default=str)
        except (AssertionError, ValueError):  # it has none for some shapes, and says so this way
            continue
        if text not in found.values():
            found[f"humming m={rows}"] = text
    return found


class Sweep:
    """One scheme over many shapes."""

    def __init__(self, scheme: str, peers: bool) -> None:
        self.scheme, self.peers = scheme, peers
        self.registry, self.target = default_registry(), device_target(DEVICE, Policy())
        self.op = self.registry.op("linear")
        self.build = confirmed_build(self.registry, self.target)
        self.kernels = [k for k in self.registry.kernels_of("linear") if k.language == "cuda" and k.provider == "gristmill"]
        self.timings: list[Timing] = []

    def shape(self, n: int, k: int, ms: tuple[int, ...], data: torch.Tensor) -> list[dict[str, Any]]:
        """Rows of the result, one for each m."""
        q = quantize(torch.randn(n, k, device=DEVICE), self.scheme)
        wide = q.dequantize()
        floor, how = floor_us(data, q.nbytes) if self.peers else (0.0, "not measured")
        packed: dict[str, list[Any]] = {}
        for kernel in self.kernels:
            names = [name for name in kernel.layouts if self.registry.layout(name).accepts(self.scheme)]
            if names and names[0] not in packed:
                packed[names[0]] = cold_copies(pack(q, names[0]).tensors)
        humming = self._humming(q) if self.peers else None
        dense = [wide.bfloat16().clone() for _ in range(max(2, COLD // (n * k * 2) + 1))] if self.peers else []
        return [self._row(n, k, m, wide, packed, humming, dense, floor, how) for m in ms]

    def _humming(self, q: QuantTensor) -> list[Any] | None:
        module = import_module("gristmill.kernels.linear.linear_humming")
        problem = self.op.problem(f"m=1,n={q.n},k={q.k},w={self.scheme}")
        try:
            version("humming-kernels")
        except PackageNotFoundError:
            return None
        if module.accepts(problem) is not None:
            return None
        tensors = pack(q, "humming_v1").tensors
        count = max(2, COLD // sum(t.nbytes for t in tensors) + 1)
        locks = torch.zeros(module.LOCKS.bytes // 4, dtype=torch.int32, device=DEVICE)
        return [[*(t.clone() for t in tensors[:4]), locks, tensors[4]] for _ in range(count)]

    def _row(
        self, n: int, k: int, m: int, wide: torch.Tensor, packed: dict[str, list[Any]], humming: Any, dense: list[Any],
        floor: float, how: str,
    ) -> dict[str, Any]:  # fmt: skip
        problem = self.op.problem(f"m={m},n={n},k={k},w={self.scheme}")
        x, out = torch.randn(m, k, device=DEVICE).bfloat16(), torch.empty(m, n, dtype=torch.bfloat16, device=DEVICE)
        graphs, configs, errors = Graphs(), {}, {}
        if dense:
            graphs.add("cublas_bf16", dense_calls(x, dense, out))
        for name, tuning in (humming_options(humming, m) if humming else {}).items():
            calls = humming_calls(x, humming, out, tuning)
            out.fill_(float("nan"))
            calls[0]()
            errors[name] = column_error(out, x, wide)
            if errors[name] < LIMIT:
                graphs.add(name, calls)
        for kernel in self.kernels:
            weights = next((packed[name] for name in kernel.layouts if name in packed), None)
            if weights is not None and kernel.accepts(problem) is None:
                self._ours(kernel, problem, x, weights, n, out, wide, graphs, configs, errors)
        samples = graphs.samples(11)
        us = {name: statistics.median(v) for name, v in samples.items()}
        ours = {name: us[name] for name in configs}
        for kernel in self.kernels:
            mine = sorted((us[name], name) for name in configs if name.startswith(kernel.name + "/"))
            if mine:
                self.timings.append(Timing(
                    op="linear", kernel=kernel.name, code="", config=configs[mine[0][1]], problem=str(problem),
                    target=target_key(self.target), toolchain=self.build.key(), us=round(mine[0][0], 3), timing="graph,cold",
                ))  # fmt: skip
        peers = [v for name, v in us.items() if name not in configs]
        bar = max(min(peers) / (1.5 if m <= 16 else 1.2 if m <= 128 else 1.0), floor / 0.85) if peers else None
        best = min(ours.values(), default=None)
        met = None if bar is None or best is None else best <= bar
        shown = "  ".join(f"{name} {v:.2f}" for name, v in us.items() if name not in configs)
        print(f"{self.scheme} {n}x{k} m={m}: ours {best or 0:.2f} {min(ours, key=lambda c: ours[c]) if ours else ''}  bar {bar or 0:.2f}  "
              f"floor {floor:.2f}  {shown}  {'' if met is None else 'met' if met else 'NOT met'}", flush=True)  # fmt: skip
        return {"scheme": self.scheme, "n": n, "k": k, "m": m, "floor_us": floor, "floor_how": how, "us": us, "errors": errors,
                "configs": configs, "bar_us": bar, "met": met, "samples": samples}  # fmt: skip

    def _ours(
        self, kernel: Kernel, problem: Any, x: Any, weights: list[Any], n: int, out: Any, wide: Any, graphs: Graphs,
        configs: dict[str, Any], errors: dict[str, float],
    ) -> None:  # fmt: skip
        launcher = load(kernel)
        options = [dict(kernel.config(problem, self.target))]
        if kernel.space is not None:
            options += [dict(c) for c in kernel.space(problem, self.target) if dict(c) != options[0]]
        space = workspace(kernel, problem, options)
        for place, option in enumerate(fastest(launcher, options, x, weights, n, out, space)):
            name = f"{kernel.name}/{place}"
            out.fill_(float("nan"))
            launcher(option, x, weights[0], None, None, False, n, space, out)
            errors[name] = column_error(out, x, wide)
            if not errors[name] < LIMIT:
                raise RuntimeError(f"{kernel.name} at {option} is wrong for {problem}: error {errors[name]:.2g}")
            configs[name] = option
            graphs.add(name, our_calls(launcher, option, x, weights, n, out, space))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--tuned", type=Path, help="write our times as a store, too")
    parser.add_argument("--schemes", default="int4_g128,nvfp4,mxfp4", help="by commas")
    parser.add_argument("--shapes", default="table", help="table, more, all, or NxK by commas")
    parser.add_argument("--m", default="1,4,8,16,32", help="rows of x, by commas")
    parser.add_argument("--alone", action="store_true", help="without peers and floor")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further shape after that long")
    given = parser.parse_args()
    start, peers = time.time(), not given.alone
    sets = {"table": TABLE, "more": MORE, "all": TABLE + MORE}
    shapes = sets.get(given.shapes) or tuple(tuple(int(v) for v in s.split("x")) for s in given.shapes.split(","))
    before, rows, store = environment(), [], Store()
    data = torch.randint(0, 1 << 30, ((2 * COLD + (512 << 20)) // 4,), dtype=torch.int32, device=DEVICE)
    command = " ".join(["python -m gristmill.bench.weight_only_sweep", *sys.argv[1:]])
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for scheme in given.schemes.split(","):
        sweep = Sweep(scheme, peers)
        for n, k in shapes:
            if time.time() - start > given.seconds:
                continue
            rows += sweep.shape(n, k, tuple(int(m) for m in given.m.split(",")), data)
            torch.cuda.empty_cache()
            given.out.write_text(json.dumps({"command": command, "before": before, "after": environment(), "rows": rows}))
        for timing in sweep.timings:
            store.add(timing)
        if given.tuned:
            given.tuned.write_text(dump(store))
    judged = [row for row in rows if row["met"] is not None]
    print(f"bars met: {sum(row['met'] for row in judged)} of {len(judged)}; {time.time() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
