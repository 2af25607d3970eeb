"""Memory-bound CPU kernels next to the read rate of the same machine, interleaved, raw samples kept.

    OMP_NUM_THREADS=1 python -m gristmill.bench.cpu --out bench/results/cpu/threads1.json

`kernelbench bench` measures the floor once and a kernel after it: on a machine that others use too, the two then see different loads. Here
every round times the floor (a float32 sum over more than the last cache) and every kernel in turn, and the least sample of each counts:
what the machine does when nobody is in the way. Reported as floor / time, with the medians beside them.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

from gristmill import console
from gristmill.autotune.timing import argument_sets
from gristmill.bench.place import place
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.interpreter import load

CASES = tuple(
    ("linear", f"m={m},n=4096,k=4096,x=bf16,w={w}") for w in ("int4_g128", "nvfp4", "bf16") for m in (1, 4, 16)
) + (
    ("paged_attention", "q_tokens=1,seqs=1,max_q=1,max_ctx=4096,total_ctx=4096,heads=32,kv_heads=8"),
    ("paged_attention", "q_tokens=8,seqs=8,max_q=1,max_ctx=4096,total_ctx=32768,heads=32,kv_heads=8"),
    ("rms_norm", "m=1,n=4096"),
    ("rms_norm", "m=4096,n=4096"),
)  # fmt: skip
FLOOR_BYTES = 256 << 20


@click.command()
@click.option("--case", "only", metavar="TEXT", default="", help="Only cases whose op or problem contains this.")
@click.option("--rounds", type=click.IntRange(3), default=25, show_default=True, help="Rounds; each times everything once.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the raw samples here as JSON.")
def main(only: str, rounds: int, out: Path | None) -> None:
    """Time the C++ kernels of CASES at the best level here, with the threads that OMP_NUM_THREADS gives torch."""
    here = place(None)
    data = torch.ones(FLOOR_BYTES // 4)
    calls: list[tuple[str, str, float, Callable[[], None]]] = [("floor", "sum of 256 MiB", FLOOR_BYTES, lambda: data.sum())]
    for op_name, text in CASES:
        if only in f"{op_name} {text}":
            calls.append((op_name, text, *_rotating(op_name, text, here.target)))
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for place_of, (_, _, _, call) in enumerate(calls):
            call()
            start = time.perf_counter()
            count = 0
            while count < 2 or time.perf_counter() - start < 0.02:
                call()
                count += 1
            samples[place_of].append((time.perf_counter() - start) / count * 1e6)
    floor, typical = FLOOR_BYTES / min(samples[0]), FLOOR_BYTES / statistics.median(samples[0])
    rows = [
        {"op": op, "problem": text, "bytes": bytes_, "least_us": min(us), "median_us": statistics.median(us),
         "floor_us": bytes_ / floor, "of_floor": bytes_ / floor / min(us),
         "of_floor_by_medians": bytes_ / typical / statistics.median(us), "samples_us": us}
        for (op, text, bytes_, _), us in zip(calls, samples, strict=True)
    ]  # fmt: skip
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        about = {"target": here.target.name, "device": here.target.device, "threads": torch.get_num_threads(),
                 "torch": torch.__version__, "system": platform.platform(), "shared_machine": True,
                 "read_gbs": floor / 1e3}  # fmt: skip
        out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    console.table(
        f"{here.target.device}, {torch.get_num_threads()} thread(s), reads {floor / 1e3:.1f} GB/s",
        ["op", "problem", "least µs", "median µs", "floor µs", "of floor", "by medians"],
        [[r["op"], r["problem"], *(console.number(r[key]) for key in ("least_us", "median_us", "floor_us")),
          f"{r['of_floor']:.0%}", f"{r['of_floor_by_medians']:.0%}"] for r in rows],
        right=("least µs", "median µs", "floor µs", "of floor", "by medians"),
    )  # fmt: skip


def _rotating(op_name: str, text: str, target: Any) -> tuple[float, Callable[[], None]]:
    """Bytes of the problem, and a call of its C++ kernel that finds its arguments in memory, not in a cache."""
    op, kernel = default_registry().op(op_name), default_registry().kernel(op_name, f"{op_name}_cpu")
    problem = op.problem(text)
    sets, config, launch = argument_sets(op, kernel, problem, "cpu"), dict(kernel.config(problem, target)), load(kernel)
    turn = 0

    def call() -> None:
        nonlocal turn
        turn = (turn + 1) % len(sets)
        launch(config, *sets[turn])

    return float(op.cost(problem).bytes), call


if __name__ == "__main__":
    main()
