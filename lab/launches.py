"""What it costs the host to launch a step with prompts: operations and kernels of a layer, and where the time goes.

    python -m lab.launches --model qwen3-0.6b --tokens 256,512,1024,2048,4096,8192 --out launches.json

A step computes prompts of T random ids and one token of each of --others requests. `launch` is the time after which the host could
launch the next step, parted into what its launchers take (by operation: calls of a step and microseconds each), `plans` (guards and the
choice of the kernel, of all calls), `layers` (Python of the model, allocation and workspaces), and `step` (inputs, logits, sampling).
`whole` is the time until the ids are on the host. On a GPU a trace adds kernels and copies, and their time without pauses. On a CPU
launchers do nothing: the other parts are those of a GPU's host. Each value of --prompt-graphs is an engine of its own: 0 launches kernel by
kernel, `auto` is the default of an engine. A step that runs as graphs is `step` alone.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gristmill import LLM, SamplingParams
from gristmill.autotune.bound import BoundPlan
from gristmill.autotune.device import device_target
from gristmill.autotune.environment import environment
from gristmill.bench.device_trace import recorded, summary
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.scheme import cdiv
from gristmill.runtime.runner import Runner
from gristmill.runtime.sampler import SamplingRow
from gristmill.runtime.scheduler import ScheduledRequest
from lab.engine import SHAPES, random_model, wait
from lab.result import write_result

ROW = SamplingRow(SamplingParams(temperature=0.0), 0, 0)
PLANS, LAYERS, STEP = "plans", "layers", "step"
OTHERS_CONTEXT = 64
"""Tokens in the cache of the requests that decode beside the prompts."""


def entries_of(tokens: int, others: int, longest: int, block_size: int) -> list[ScheduledRequest]:
    """A step of `tokens` tokens, `others` of them in decode; the sequences share their blocks, which the time does not depend on."""

    def sequence(start: int, count: int) -> ScheduledRequest:
        blocks = list(range(cdiv(start + count, block_size)))
        return ScheduledRequest("launches", start, count, True, [7] * count, blocks, [], 0)

    prompt = tokens - others
    lengths = [longest] * (prompt // longest) + [prompt % longest] * (prompt % longest > 0)
    return [sequence(0, count) for count in lengths] + [sequence(OTHERS_CONTEXT, 1)] * others


def nothing(call: Any) -> None:
    """A launcher on a CPU."""


class Clock:
    """Microseconds and numbers of calls by name. Inside of the model's layers they count as such."""

    def __init__(self) -> None:
        self.us: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self.inside = False

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose calls are timed under `name`."""

        def call(*arguments: Any, **named: Any) -> Any:
            begin, inside = time.perf_counter(), self.inside
            self.inside = inside or name == LAYERS
            try:
                return function(*arguments, **named)
            finally:
                self.inside = inside
                key = name if inside or name in (LAYERS, STEP) else f"{name} after the layers"
                self.us[key] += (time.perf_counter() - begin) * 1e6
                self.calls[key] += 1

        return call


@contextmanager
def clocked(runner: Runner) -> Iterator[Clock]:
    """Time launchers by operation, calls of plans, the layers of the model and the launch of a step. On a CPU launchers do nothing."""
    clock, model = Clock(), runner.model
    plans = list(model.plans.bound.values())
    kept = [(plan, plan._runners) for plan in plans]
    run, forward, launch = BoundPlan.run, model.forward, runner.launch
    cuda = runner.device.type == "cuda"
    for plan in plans:
        plan._runners = [r and clock.timed(plan.op.name, r if cuda else nothing) for r in plan._runners]
    BoundPlan.run = clock.timed(PLANS, run)  # type: ignore[method-assign]
    model.forward = clock.timed(LAYERS, forward)  # type: ignore[method-assign]
    runner.launch = clock.timed(STEP, launch)  # type: ignore[method-assign]
    try:
        yield clock
    finally:
        BoundPlan.run = run  # type: ignore[method-assign]
        model.forward, runner.launch = forward, launch  # type: ignore[method-assign]
        for plan, runners in kept:
            plan._runners = runners


def measure(runner: Runner, entries: list[ScheduledRequest], steps: int) -> dict[str, Any]:
    """A row: the times of a step."""
    rows = [ROW] * len(entries)
    layers = runner.model.config.num_layers

    def step() -> tuple[float, float]:
        begin = time.perf_counter()
        launched = runner.launch(entries, rows)
        us = (time.perf_counter() - begin) * 1e6
        runner.collect(launched)
        return us, (time.perf_counter() - begin) * 1e6

    for _ in range(3):
        step()
    with clocked(runner) as clock:
        times = [step() for _ in range(steps)]
    if runner.device.type == "cuda":
        times = [step() for _ in range(steps)]  # without the clock
    per_step = {name: us / steps for name, us in clock.us.items()}
    names = {plan.op.name for plan in runner.model.plans.bound.values()}
    operations = {name: us for name, us in per_step.items() if name in names}
    launchers = sum(operations.values())
    return {
        "tokens": sum(entry.count for entry in entries),
        "sequences": len(entries),
        "launch_us": statistics.median(us for us, _ in times),
        "whole_us": statistics.median(us for _, us in times),
        "parts_us": {
            "launchers": launchers,
            PLANS: per_step.get(PLANS, 0.0) - launchers,
            LAYERS: per_step.get(LAYERS, 0.0) - per_step.get(PLANS, 0.0),
            STEP: per_step[STEP] - per_step.get(LAYERS, 0.0),
        },
        "calls_per_layer": sum(clock.calls[name] for name in operations) / steps / layers,
        "operations": {
            name: {"calls": clock.calls[name] / steps, "us": clock.us[name] / clock.calls[name]}
            for name in sorted(operations, key=lambda name: -operations[name])
        },
        **(kernels(step, steps, layers) if runner.device.type == "cuda" else {}),
    }


def measured(folder: Path, prompt_graphs: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of an engine."""
    largest = max(options.tokens)
    llm = LLM(
        folder,
        quant=options.quant,
        device=options.device,
        max_batch_tokens=max(largest, 256),
        max_seqs=max(1, options.others) + 1,
        num_blocks=cdiv(max(largest, OTHERS_CONTEXT), 16) + 1,
        prompt_graphs=None if prompt_graphs == "auto" else int(prompt_graphs),
    )
    runner, room = llm.engine.runner, min(largest, llm.config.max_position - 1)
    if not isinstance(runner, Runner):
        raise TypeError(f"measured is the runner of one device, got {type(runner).__name__}")
    rows = []
    for tokens in options.tokens:
        entries = entries_of(tokens, min(options.others, tokens - 1), room, 16)
        rows.append({"prompt_graphs": prompt_graphs, **measure(runner, entries, options.steps)})
    llm.close()
    return rows


def kernels(step: Callable[[], object], steps: int, layers: int) -> dict[str, Any]:
    """Kernels and copies of a step, from a trace."""
    wait()

    def run() -> None:
        for _ in range(steps):
            step()
        wait()

    trace = summary(recorded(run), 1, steps)
    return {"kernels_per_layer": trace.launches / layers, "kernels_us": trace.step - trace.idle}


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m lab.launches", description=str(__doc__).split("\n")[0])
    parser.add_argument("--model", required=True, help=f"a directory, or one of {', '.join(SHAPES)}")
    parser.add_argument("--layers", type=int, help="of a model with random weights; default: all")
    parser.add_argument("--quant", help="number format of the weights")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", default="256,512,1024,2048,4096,8192", help="of the steps")
    parser.add_argument("--others", type=int, default=16, help="requests in decode in each step")
    parser.add_argument("--prompt-graphs", default="0,auto", help="values of the option of LLM; auto = None")
    parser.add_argument("--steps", type=int, default=20, help="steps of each size")
    parser.add_argument("--out", required=True, help="where the JSON goes")
    options = parser.parse_args(argv)
    options.tokens = [int(tokens) for tokens in options.tokens.split(",")]
    return options


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    options = arguments(argv)
    with tempfile.TemporaryDirectory() as scratch:
        changes = {"num_hidden_layers": options.layers} if options.layers else {}
        named = options.model in SHAPES
        folder = random_model(options.model, Path(scratch), **changes) if named else Path(options.model)
        rows = [row for text in options.prompt_graphs.split(",") for row in measured(folder, text, options)]
    command = f"python -m lab.launches {shlex.join(argv)}"
    about = environment(device_target(options.device, Policy()), command)
    write_result(options.out, {"about": about, "rows": rows})
    for row in rows:
        device = f", kernels {row['kernels_us']:.0f}" if "kernels_us" in row else ""
        parts = ", ".join(f"{name} {us:.0f}" for name, us in row["parts_us"].items())
        print(
            f"{row['tokens']:6} tokens, prompt graphs {row['prompt_graphs']:>4}: launch {row['launch_us']:.0f} µs ({parts}), "
            f"whole {row['whole_us']:.0f}{device}, {row['calls_per_layer']:.1f} calls per layer"
        )


if __name__ == "__main__":
    main()
