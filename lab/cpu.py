"""The C++ kernels of every operation next to the read bandwidth of the same machine, interleaved.

    python -m lab.cpu --threads 1 --out cpu.json

`kernelbench bench` measures the floor once and the kernels after it; on a shared machine the two see different loads. Here every round
times the floor (a float32 sum over more than the last-level cache, which reads everything once, like STREAM without the writes) and every
kernel in turn. The minimum of the samples of each counts, as an estimate of the idle machine. With one thread, time is thread CPU time, so
that descheduling does not count; contention for memory still does. The fraction of a row is (bytes / floor) / time, of the minima and of
the medians.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch

from gristmill import console
from gristmill.autotune.environment import environment
from gristmill.autotune.place import place
from gristmill.autotune.rotation import Rotation
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.load import load
from lab.result import write_result

DECODE = "heads=32,kv_heads=8"
CASES = (
    *(
        ("linear", f"m={m},n=4096,k=4096,x=bf16,w={w}")
        for w in ("bf16", "int4_g128", "fp8_block", "mxfp4", "nvfp4", "int8_ch")
        for m in (1, 4, 16)
    ),
    ("linear", "m=1,n=8,k=65536,x=bf16,w=int4_g128"),
    ("paged_attention", f"q_tokens=1,seqs=1,max_q=1,max_ctx=4096,total_ctx=4096,{DECODE}"),
    ("paged_attention", f"q_tokens=8,seqs=8,max_q=1,max_ctx=4096,total_ctx=32768,{DECODE}"),
    ("paged_attention", "q_tokens=1,seqs=1,max_q=1,max_ctx=4096,total_ctx=4096,heads=8,kv_heads=8"),
    ("mla_attention", "q_tokens=1,seqs=1,max_q=1,max_ctx=8192,total_ctx=8192,heads=16"),
    ("varlen_attention", "q_tokens=256,seqs=1,max_q=256,max_ctx=256,total_ctx=256,heads=16,kv_heads=16"),
    ("merge_attention_states", "t=1024,h=32,d=128"),
    ("reshape_and_cache", "t=4096,h=8,d=128,dv=128"),
    ("reshape_and_cache_mla", "t=4096"),
    ("rms_norm", "m=1,n=4096"),
    ("rms_norm", "m=1024,n=7168"),
    ("fused_add_rms_norm", "m=1024,n=7168"),
    ("silu_and_mul", "m=1024,n=14336"),
    ("rotary_embedding", "t=1024,hq=32,hk=8,d=128,rot=128"),
    ("rotary_embedding", "t=1024,hq=32,hk=8,d=128,rot=128,style=gptj"),
    ("moe", "m=1,top_k=8,e=32,h=2048,i=768,w=int4_g128"),
    ("grouped_linear", "m=8,e=32,n=1536,k=2048,w=int4_g128,epilogue=silu_mul"),
    ("grouped_topk", "m=1024,e=256,top_k=8,n_group=8,topk_group=4,scoring=sigmoid,bias=true"),
    ("permute", "m=4096,top_k=8,e=256"),
    ("combine", "m=256,top_k=8,h=7168"),
    ("sample", "m=8,v=128256"),
)
FLOOR_BYTES = 256 << 20


@dataclass
class Case:
    """One timed call: its least bytes, the call, and its samples in microseconds."""

    op: str
    problem: str
    bytes: float
    call: Callable[[], object]
    us: list[float] = field(default_factory=list)


@click.command()
@click.option(
    "--case",
    "only",
    metavar="TEXT",
    default="",
    help="Only cases whose operation or problem contains this text.",
)
@click.option(
    "--rounds",
    type=click.IntRange(3),
    default=40,
    show_default=True,
    help="Number of rounds; each times every case once.",
)
@click.option("--threads", type=click.IntRange(1), help="Threads of torch's pool. Default: OMP_NUM_THREADS.")
@click.option("--level", metavar="LEVEL", help="Code level: avx2, avx512 ... Default: the best one here.")
@click.option("--out", type=click.Path(path_type=Path), help="Write a result file.")
def main(only: str, rounds: int, threads: int | None, level: str | None, out: Path | None) -> None:
    """Time the C++ kernels of CASES, as fractions of the read bandwidth of this machine."""
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        target = place(f"cpu:{level}" if level else "cpu").target
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if level and target.name not in place("cpu").target.levels:
        raise click.UsageError(
            f"this CPU has no level {level}; it has {', '.join(place('cpu').target.levels)}"
        )
    data = torch.ones(FLOOR_BYTES // 4)
    cases = [Case("floor", "sum of 256 MiB", FLOOR_BYTES, data.sum)]
    cases += [made_case(op, text, target) for op, text in CASES if only in f"{op} {text}"]
    if len(cases) == 1:
        raise click.UsageError(f"no case contains {only!r}")
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for number in range(rounds):
        print(f"\rround {number + 1} of {rounds}", end="", file=sys.stderr, flush=True)
        for case in cases:
            case.us += sample(case.call, clock)
    print(file=sys.stderr)
    floor, usual = (FLOOR_BYTES / of(cases[0].us) for of in (min, statistics.median))
    rows: list[dict[str, Any]] = [
        {
            "op": c.op,
            "problem": c.problem,
            "bytes": c.bytes,
            "least_us": min(c.us),
            "median_us": statistics.median(c.us),
            "gbs": c.bytes / min(c.us) / 1e3,
            "of_floor": c.bytes / floor / min(c.us),
            "of_floor_by_medians": c.bytes / usual / statistics.median(c.us),
            "samples_us": [round(us, 2) for us in c.us],
        }
        for c in cases
    ]
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        command = "python -m lab.cpu " + " ".join(
            f"--{name} {value}"
            for name, value in (("threads", torch.get_num_threads()), ("level", level), ("case", only))
            if value
        )
        about = {
            **environment(target, command),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "clock": clock.__name__,
            "system": f"{platform.system()} {platform.machine()}",
            "read_gbs": floor / 1e3,
            "load": os.getloadavg()[0],
        }
        write_result(out, {"about": about, "rows": rows})
    figures = ("least µs", "median µs", "GB/s", "of floor", "by medians")
    console.table(
        f"{target.device}, {target.name}, {torch.get_num_threads()} thread(s), reads {floor / 1e3:.1f} GB/s",
        ["op", "problem", *figures],
        [
            [
                r["op"],
                r["problem"],
                *(console.number(r[key]) for key in ("least_us", "median_us", "gbs")),
                f"{r['of_floor']:.0%}",
                f"{r['of_floor_by_medians']:.0%}",
            ]
            for r in rows
        ],
        right=figures,
    )


def sample(call: Callable[[], object], clock: Callable[[], float]) -> list[float]:
    """Microseconds per call, for about 10 ms; calls too short for the clock are timed in batches."""
    start = clock()
    call()
    batch = max(1, int(100e-6 / max(clock() - start, 1e-7)))
    samples: list[float] = []
    end = time.perf_counter() + 0.01
    while not samples or time.perf_counter() < end:
        start = clock()
        for _ in range(batch):
            call()
        samples.append((clock() - start) / batch * 1e6)
    return samples


def made_case(op_name: str, text: str, target: Target) -> Case:
    """A call of the operation's C++ kernel with cold arguments."""
    op = default_registry().op(op_name)
    kernel: Any = next(
        k
        for k in default_registry().kernels_of(op_name)
        if k.language == "cpp" and "cpu" in k.requires.vendors
    )
    problem = op.problem(text)
    rotation, config, launch = (
        Rotation(op, kernel, problem, "cpu"),
        dict(kernel.config(problem, target)),
        load(kernel),
    )

    def call() -> None:
        launch(config, rotation.next())

    return Case(op_name, text, float(op.cost(problem).bytes), call)


if __name__ == "__main__":
    main()
