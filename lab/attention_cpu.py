"""Attention on CPUs beside torch's scaled_dot_product_attention and the limits of the machine, interleaved.

    python -m lab.attention_cpu --threads 2 --out attention_cpu.json

Every round times a read of 256 MiB (a float32 sum, as `lab.cpu`), a float32 matrix product of torch, and for each case the C++ kernel and
torch, on the same shapes: torch in the case's dtype and in float32, contexts of one length, keys and values dense and contiguous (it has
no paged cache). Arguments are cold: every call takes the next of several copies, which together exceed the last-level cache. Medians
count; the fraction of a row is (bytes / read bandwidth) / time or (operations / rate of the matrix product) / time, whichever is
larger.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from torch.nn.functional import scaled_dot_product_attention

from gristmill import console
from gristmill.autotune.environment import environment
from gristmill.autotune.place import place
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from lab.cpu import FLOOR_BYTES, made_case
from lab.result import write_result

COLD_BYTES = 128 << 20
MATMUL = 1536
GQA, SMALL, MIDDLE = (
    "heads=32,kv_heads=8",
    "heads=14,kv_heads=2,head_dim=64",
    "heads=16,kv_heads=8",
)


def decode(batch: int, context: int) -> str:
    return f"q_tokens={batch},seqs={batch},max_q=1,max_ctx={context},total_ctx={batch * context}"


def prefill(tokens: int) -> str:
    return f"q_tokens={tokens},seqs=1,max_q={tokens},max_ctx={tokens},total_ctx={tokens}"


def encoder(batch: int, tokens: int, window: int = -1) -> str:
    lengths = (
        f"q_tokens={batch * tokens},seqs={batch},max_q={tokens},max_ctx={tokens},total_ctx={batch * tokens}"
    )
    return f"{lengths},heads=12,kv_heads=12,qk_dim=64,v_dim=64,window_left={window},window_right={window}"


CASES = {
    "decode_b1": ("paged_attention", f"{decode(1, 4096)},{GQA}"),
    "decode_b8": ("paged_attention", f"{decode(8, 4096)},{GQA}"),
    "decode_small_b1": ("paged_attention", f"{decode(1, 4096)},{SMALL}"),
    "decode_small_b8": ("paged_attention", f"{decode(8, 4096)},{SMALL}"),
    "decode_middle_b1": ("paged_attention", f"{decode(1, 4096)},{MIDDLE}"),
    "decode_fp8_b1": ("paged_attention", f"{decode(1, 4096)},{GQA},kv=fp8,kv_scale=head"),
    "decode_fp8_b8": ("paged_attention", f"{decode(8, 4096)},{GQA},kv=fp8,kv_scale=head"),
    "prefill_2k": ("paged_attention", f"{prefill(2048)},{GQA}"),
    "prefill_small_2k": ("paged_attention", f"{prefill(2048)},{SMALL}"),
    "prefill_middle_2k": ("paged_attention", f"{prefill(2048)},{MIDDLE}"),
    "mla_decode": ("mla_attention", f"{decode(1, 4096)},heads=16"),
    "mla_prefill": ("varlen_attention", f"{prefill(512)},heads=16,kv_heads=16"),
    "encoder_32": ("varlen_attention", encoder(32, 32)),
    "encoder_512": ("varlen_attention", encoder(8, 512)),
    "encoder_512_window": ("varlen_attention", encoder(8, 512, 64)),
    "smallest": ("paged_attention", f"{decode(1, 64)},heads=2,kv_heads=1,head_dim=16"),
}


@dataclass
class Case:
    """The calls of one case, and the samples of each in microseconds."""

    name: str
    op: str
    problem: Problem
    calls: dict[str, Callable[[], object]]
    us: dict[str, list[float]] = field(default_factory=dict)


def made(name: str, target: Target) -> Case:
    """Calls of the C++ kernel, and of torch on dense tensors of the same sizes, where torch can compute the same."""
    op_name, text = CASES[name]
    problem = default_registry().op(op_name).problem(text)
    calls: dict[str, Callable[[], object]] = {"gristmill": made_case(op_name, text, target).call}
    if op_name == "paged_attention":
        if problem.text("kv") != "fp8":
            calls["sdpa"] = sdpa(problem, torch.bfloat16)
        calls["sdpa_fp32"] = sdpa(problem, torch.float32)
    elif problem["qk_dim"] == problem["v_dim"]:
        calls["sdpa"], calls["sdpa_fp32"] = sdpa(problem, torch.bfloat16), sdpa(problem, torch.float32)
    return Case(name, op_name, problem, calls)


def sdpa(problem: Problem, dtype: torch.dtype) -> Callable[[], object]:
    """torch's attention: causal where there is more than one query, of encoders in both directions, by a mask where there is a window."""
    batch, context, queries = problem.integers("seqs", "max_ctx", "max_q")
    encodes = problem.op == "varlen_attention"
    heads, kv_heads, dim = problem.integers("heads", "kv_heads", "qk_dim" if encodes else "head_dim")
    window = problem.integer("window_right") if encodes else -1
    place = torch.arange(context)
    mask = (place[:, None] - place).abs() <= window if window >= 0 else None
    cache = torch.randn(2, batch, kv_heads, context, dim).to(dtype)
    copies = cycle([cache.clone() for _ in range(max(1, COLD_BYTES // (cache.numel() * cache.itemsize)))])
    q = torch.randn(batch, heads, queries, dim).to(dtype)

    def call() -> object:
        k, v = next(copies)
        causal = queries > 1 and not encodes
        return scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=heads > kv_heads)

    return call


def sample(call: Callable[[], object], seconds: float = 0.02) -> list[float]:
    """Microseconds per call, at least one call and as many as fit in `seconds`."""
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while not samples or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        samples.append((time.perf_counter() - start) * 1e6)
    return samples


@click.command()
@click.option("--cases", default=",".join(name for name in CASES if name != "smallest"), help="By commas.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
@click.option("--threads", type=click.IntRange(1), help="Threads of torch's pool. Default: OMP_NUM_THREADS.")
@click.option("--out", type=click.Path(path_type=Path), help="Write a result file.")
def main(cases: str, rounds: int, threads: int | None, out: Path | None) -> None:
    """Time attention on this CPU beside torch's, the read bandwidth and the float32 matrix product."""
    unknown = [name for name in cases.split(",") if name not in CASES]
    if unknown:
        raise click.UsageError(f"unknown case {unknown[0]!r}; known: {', '.join(CASES)}")
    if threads is not None:
        torch.set_num_threads(threads)
    target = place("cpu").target
    data, matrix = torch.ones(FLOOR_BYTES // 4), torch.randn(MATMUL, MATMUL)
    product = torch.empty_like(matrix)
    rows: list[dict[str, Any]] = []
    for name in cases.split(","):  # one at a time: the copies of all would not fit in memory
        case = made(name, target)
        case.calls |= {"read": data.sum, "matmul": lambda: torch.mm(matrix, matrix, out=product)}
        for call in case.calls.values():
            call()
        for number in range(rounds):
            print(f"\r{name}: round {number + 1} of {rounds}   ", end="", file=sys.stderr, flush=True)
            for label, call in case.calls.items():
                case.us.setdefault(label, []).extend(sample(call))
        rows.append(row_of(case))
    print(file=sys.stderr)
    if out:
        command = f"python -m lab.attention_cpu --threads {torch.get_num_threads()} --cases {cases} --rounds {rounds}"
        about = {
            **environment(target, command),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "system": f"{platform.system()} {platform.machine()}",
            "load": os.getloadavg()[0],
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        write_result(out, {"about": about, "rows": rows})
    figures = ("ms", "GB/s", "Gflop/s", "limit", "of limit", "sdpa", "sdpa fp32")
    console.table(
        f"{target.device}, {target.name}, {torch.get_num_threads()} thread(s)",
        ["case", *figures],
        [
            [
                r["case"],
                console.number(r["median_us"]["gristmill"] / 1e3),
                console.number(r["gbs"]),
                console.number(r["gflops"]),
                r["limit"],
                f"{r['of_limit']:.0%}",
                *(
                    f"{r['speedup'][peer]:.2f}" if peer in r["speedup"] else ""
                    for peer in ("sdpa", "sdpa_fp32")
                ),
            ]
            for r in rows
        ],
        right=figures,
    )


def row_of(case: Case) -> dict[str, Any]:
    """Medians, rates and the samples. speedup: torch's time over the kernel's."""
    cost = default_registry().op(case.op).cost(case.problem)
    medians = {label: median(us) for label, us in case.us.items()}
    us = medians["gristmill"]
    read, rate = (
        FLOOR_BYTES / medians["read"],
        2 * MATMUL**3 / medians["matmul"],
    )  # bytes and operations per µs
    by_bytes = float(cost.bytes) / read >= float(cost.flops or 0) / rate
    return {
        "case": case.name,
        "op": case.op,
        "problem": str(case.problem),
        "bytes": float(cost.bytes),
        "flops": float(cost.flops or 0),
        "median_us": {label: round(value, 2) for label, value in medians.items()},
        "gbs": float(cost.bytes) / us / 1e3,
        "gflops": float(cost.flops or 0) / us / 1e3,
        "read_gbs": read / 1e3,
        "matmul_gflops": rate / 1e3,
        "limit": "read" if by_bytes else "matmul",
        "of_limit": max(float(cost.bytes) / read, float(cost.flops or 0) / rate) / us,
        "speedup": {label: value / us for label, value in medians.items() if label.startswith("sdpa")},
        "samples_us": {label: [round(value, 1) for value in values] for label, values in case.us.items()},
    }


if __name__ == "__main__":
    main()
