"""Every registered kernel of weight-only linear that can run here, side by side on one GPU: what plans choose among.

    python -m gristmill.bench.linear_candidates --schemes int4_g128,nvfp4 --shapes 4096x4096 --m 1,256 --out found.json --tuned tuned.json

The harness is that of `linear_weight_only`: cold weights, graphs of calls back to back, candidates replayed in turn, with the
workspace that each asks for. Of a kernel with a space the fastest of its first configurations is taken. cuBLAS in bf16 and the floor of
the bytes stand beside them. ``--tuned`` writes the times of all candidates as a store: they count only together, since a kernel
that was measured goes before one whose time is an estimate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
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
    fastest,
    floor_us,
    our_calls,
    workspace,
)
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store, Timing, target_key
from gristmill.kernels.interpreter import load
from gristmill.quant import QuantTensor, pack, quantize
from gristmill.quant.packed import LayoutError

LIMIT = 6e-3
SLOW = ("linear_dequant_torch",)
"""Left out: the last fallback, hundreds of times slower than the others."""
SPACE = 12
"""Configurations of a kernel that are tried."""

Call = Callable[[], Any]
Extra = Callable[[QuantTensor, Any, Any], Mapping[str, tuple[Call, Sequence[Call]]]]
"""(weight, x, out) -> peers that are not registered: by name a call that leaves its result in `out`, and those to be timed."""


def run_shape(
    scheme: str, n: int, k: int, ms: Sequence[int], data: torch.Tensor, store: Store, extra: Extra | None = None
) -> list[dict[str, Any]]:
    """Rows of the result, one for each m; times of the candidates go to `store`."""
    registry, target = default_registry(), device_target(DEVICE, Policy())
    op, build = registry.op("linear"), confirmed_build(registry, target)
    able = [k for k in registry.kernels_of("linear") if k.name not in SLOW and not k.requires.check_hardware(target, build)
            and not k.requires.check_build(target, build)]  # fmt: skip
    q = quantize(torch.randn(n, k, device=DEVICE), scheme)
    wide, (floor, how) = q.dequantize(), floor_us(data, q.nbytes)
    packed: dict[str, Any] = {}
    dense = [wide.bfloat16().clone() for _ in range(max(2, COLD // (n * k * 2) + 1))]
    rows = []
    for m in ms:
        problem = op.problem(f"m={m},n={n},k={k},w={scheme}")
        x, out = torch.randn(m, k, device=DEVICE).bfloat16(), torch.empty(m, n, dtype=torch.bfloat16, device=DEVICE)
        graphs, configs, errors, refused = Graphs(), {}, {}, {}
        graphs.add("cublas_bf16", dense_calls(x, dense, out))
        for kernel in able:
            if reason := kernel.accepts(problem):
                refused[kernel.name] = reason
                continue
            layout = next(name for name in kernel.layouts if registry.layout(name).accepts(scheme))
            try:
                weights = packed[layout] if layout in packed else _copies(q, layout)
                packed[layout] = weights
                launcher, config = load(kernel), dict(kernel.config(problem, target))
                options = [config, *([] if kernel.space is None else list(kernel.space(problem, target))[:SPACE])]
                space = workspace(kernel, problem, options)
                if len(options) > 1:
                    config = fastest(launcher, options, x, weights, n, out, space)
                out.fill_(float("nan"))
                launcher(config, x, weights[0], None, None, False, n, space, out)
            except (LayoutError, AssertionError) as refusal:  # humming says by an assertion that it has no configuration
                refused[kernel.name] = repr(refusal)
                continue
            errors[kernel.name] = column_error(out, x, wide)
            if not errors[kernel.name] < LIMIT:
                refused[kernel.name] = f"wrong: error {errors[kernel.name]:.2g}"
                continue
            configs[kernel.name] = config
            graphs.add(kernel.name, our_calls(launcher, config, x, weights, n, out, space))
        for name, (first, calls) in (extra(q, x, out) if extra is not None else {}).items():
            out.fill_(float("nan"))
            first()
            errors[name] = column_error(out, x, wide)
            if errors[name] < 2 * LIMIT:
                graphs.add(name, list(calls))
            else:
                refused[name] = f"wrong: error {errors[name]:.2g}"
        samples = graphs.samples(9)
        us = {name: statistics.median(values) for name, values in samples.items()}
        for name, config in configs.items():
            store.add(Timing(op="linear", kernel=name, code="", config=config, problem=str(problem), target=target_key(target),
                             toolchain=build.key(), us=round(us[name], 3), timing="graph,cold"))  # fmt: skip
        rows.append({"scheme": scheme, "n": n, "k": k, "m": m, "floor_us": floor, "floor_how": how, "us": us, "errors": errors,
                     "configs": configs, "refused": refused, "samples": samples})  # fmt: skip
        shown = "  ".join(f"{name.removeprefix('linear_')} {value:.2f}" for name, value in sorted(us.items(), key=lambda i: i[1]))
        print(f"{scheme} {n}x{k} m={m}: floor {floor:.2f}  {shown}", flush=True)
    return rows


def _copies(q: QuantTensor, layout: str) -> list[list[torch.Tensor]]:
    """Copies of the packed weight, enough that each is out of the cache when its turn comes again."""
    tensors = pack(q, layout).tensors
    count = max(2, COLD // sum(t.nbytes for t in tensors) + 1)
    return [[t.clone() for t in tensors] for _ in range(count)]


def shapes_of(text: str) -> tuple[tuple[int, ...], ...]:
    """``table``, ``more``, ``all``, or NxK by commas."""
    sets = {"table": TABLE, "more": MORE, "all": TABLE + MORE}
    return sets.get(text) or tuple(tuple(int(v) for v in shape.split("x")) for shape in text.split(","))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--tuned", type=Path, help="write the candidates' times as a store, too")
    parser.add_argument("--schemes", default="int4_g128,nvfp4", help="by commas")
    parser.add_argument("--shapes", default="table", help="table, more, all, or NxK by commas")
    parser.add_argument("--m", default="1,16,64,256,1024", help="rows of x, by commas")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further shape after that long")
    given = parser.parse_args()
    start, before, rows, store = time.time(), environment(), [], Store()
    data = torch.randint(0, 1 << 30, ((2 * COLD + (512 << 20)) // 4,), dtype=torch.int32, device=DEVICE)
    command = " ".join(["python -m gristmill.bench.linear_candidates", *sys.argv[1:]])
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for scheme in given.schemes.split(","):
        for n, k in shapes_of(given.shapes):
            if time.time() - start > given.seconds:
                continue
            rows += run_shape(scheme, n, k, [int(m) for m in given.m.split(",")], data, store)
            torch.cuda.empty_cache()
            given.out.write_text(json.dumps({"command": command, "before": before, "after": environment(), "rows": rows}))
            if given.tuned:
                given.tuned.write_text(dump(store))
    return 0


if __name__ == "__main__":
    sys.exit(main())
