"""Programs in CuTe DSL that groups of `lab.peers` call, compiled beforehand in several processes, and what each took.

    python -m lab.cutedsl_programs --groups grouped_bf16,experts_bf16_ep8 --jobs 12 --out times.json

Compiled programs stay in the folder of `gristmill.kernels.cutedsl`, where a race finds them. A GPU is not needed: without one, configurations are
those of the specs for `--target`, not tuned ones. Seconds are those of one process with its imports done, which shares the processor with others.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gristmill.autotune.device import device_target
from gristmill.autotune.environment import environment
from gristmill.kernel_registry.kernel import Config, ConfigValue, Kernel, load_attribute
from gristmill.kernel_registry.plan import bucket_index, bucket_sizes
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels import cutedsl
from gristmill.kernels.moe.moe import cutedsl as moe
from lab.peers.group import groups
from lab.peers.libraries.cutedsl import TILE
from lab.peers.ours import Selection
from lab.result import write_result

GROUPED = "gristmill.kernels.moe.grouped_linear._cutedsl_sm90:grouped_linear"
PEER = "lab.peers.libraries._cutedsl_fp8:fp8_product"
KERNELS = {"grouped_linear": "grouped_linear_cutedsl_sm90", "moe": "moe_cutedsl_sm90"}


class Made(NamedTuple):
    """A program: what builds it, and its configuration."""

    build: str
    config: tuple[tuple[str, ConfigValue], ...]


def configurations(
    kernel: Kernel, problem: Problem, target: Target, selection: Selection | None
) -> Iterator[Config]:
    """The configuration that a race takes for a problem: of its bucket, by selection if there is a device."""
    op = default_registry().op(kernel.op)
    if selection is not None:
        for choice in selection.choices(op, problem, 2):
            if choice.kernel.name == kernel.name:
                yield choice.config
        return
    size = bucket_sizes()[bucket_index(problem.integer(op.bucket or "m"))]
    yield kernel.config(op.at_bucket(op.static(problem), size), target)


def programs(names: Sequence[str], target: Target, device: str) -> list[Made]:
    """What the cells of the groups call, each once."""
    found: dict[Made, None] = {}
    selection = None if device == "cpu" else Selection(device)
    for group in (groups()[name] for name in names):
        if group.op == "linear":
            of_peer: Config = {**TILE, "x": "bf16", "arch": "sm_90a"}
            found[Made(PEER, tuple(of_peer.items()))] = None
        if group.op not in KERNELS:
            continue
        kernel = default_registry().kernel(group.op, KERNELS[group.op])
        for problem in (group.problem(cell) for cell in group.cells):
            if kernel.accepts(problem) is not None:
                continue
            for config in configurations(kernel, problem, target, selection):
                both = [config] if group.op != "moe" else [moe.config_of(config, one) for one in (1, 2)]
                found |= dict.fromkeys(Made(GROUPED, tuple(one.items())) for one in both)
    return list(found)


def compiled(made: Made) -> dict[str, Any]:
    """Compile a program, or find it: its row."""
    build, config = load_attribute(made.build), dict(made.config)
    events: list[bool] = []
    cutedsl.listeners.append(lambda name, hit: events.append(hit))
    begin = time.perf_counter()
    cutedsl.program(build, config)
    seconds = time.perf_counter() - begin
    return {"program": made.build, "config": config, "seconds": round(seconds, 2), "found": all(events)}


def main() -> int:
    parser = argparse.ArgumentParser("python -m lab.cutedsl_programs", description=__doc__.partition("\n")[0])
    parser.add_argument("--groups", default="linear_fp8,grouped_bf16,experts_bf16,experts_bf16_ep8")
    parser.add_argument("--jobs", type=int, default=4, help="processes")
    parser.add_argument("--target", default="sm_90", help="without a GPU")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--list", action="store_true", help="compile nothing")
    options = parser.parse_args()
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    target = Target.parse(options.target) if device == "cpu" else device_target(device, Policy())
    todo, begin = programs(options.groups.split(","), target, device), time.perf_counter()
    if options.list:
        rows: list[dict[str, Any]] = [{"program": made.build, "config": dict(made.config)} for made in todo]
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
            rows = list(pool.map(compiled, todo))
    for row in rows:
        print(json.dumps(row))
    took = round(time.perf_counter() - begin, 1)
    print(f"{len(rows)} programs in {took} s by {options.jobs} processes")
    if options.out:
        about = environment(
            device_target(device, Policy()), f"python -m lab.cutedsl_programs {shlex.join(sys.argv[1:])}"
        )
        packages = {} if options.list else {name: version(name) for name, _ in cutedsl.PACKAGES}
        data = {"about": about, "compiler": packages, "jobs": options.jobs, "seconds": took, "rows": rows}
        write_result(options.out, data)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
