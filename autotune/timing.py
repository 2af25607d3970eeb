"""Timing one kernel on one problem: cold inputs, rotated every call; median and spread of the raw samples."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gristmill.autotune.device import on_device
from gristmill.autotune.verify import kernel_arguments, with_workspace
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem
from gristmill.kernels.interpreter import load

CPU_COLD = 128 << 20
GPU_COLD = 256 << 20
"""Bytes over which arguments rotate: several times the last cache of the devices in use."""

MAX_SETS = 64


@dataclass(frozen=True)
class Measured:
    """us: median microseconds a call. spread: (third quartile - first) / median. samples: every round, microseconds."""

    us: float
    spread: float
    samples: tuple[float, ...]


def argument_sets(op: Op, kernel: Kernel, config: Config, problem: Problem, device: str) -> list[list[Any]]:
    """Enough different argument lists (outputs included) that each call finds its inputs in memory, not in cache.

    All have the same scratch memory, as calls in a row do.
    """
    budget = GPU_COLD if device.startswith("cuda") else CPU_COLD
    count = max(2, min(MAX_SETS, -(-budget // max(op.cost(problem).bytes, 1))))
    first = kernel_arguments(op, kernel, op.inputs(problem, 0, device))
    first = with_workspace(op, kernel, config, problem, first)
    shared = [p.name == "workspace" for p in op.parameters]
    sets = []
    for _ in range(count):
        arguments = [a if same else _copy(a) for a, same in zip(first, shared, strict=True)]
        outputs = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in op.like(*arguments)] if op.outputs else []
        sets.append([*arguments, *outputs])
    return sets


def measure(
    op: Op, kernel: Kernel, config: Config, problem: Problem, device: str, *, seconds: float = 0.5, rounds: int = 15
) -> Measured:
    """Time `kernel`: `rounds` samples in about `seconds`, after warm-up. On CUDA the calls of a round are one graph.

    A kernel that no graph can hold is called one by one, so that its time includes what the host does for it.
    """
    launcher = load(kernel)
    sample = _cpu_sampler
    if device.startswith("cuda"):
        sample = _cuda_sampler if kernel.capturable else _cuda_eager_sampler
    with on_device(device):
        sets = argument_sets(op, kernel, config, problem, device)
        return sample(lambda arguments: launcher(config, *arguments), sets, seconds, rounds)


def measure_call(call: Callable[[], None], device: str, *, seconds: float = 0.3, rounds: int = 9) -> Measured:
    """Time a call that takes no arguments: dispatch costs, floors."""
    sample = _cuda_sampler if device.startswith("cuda") else _cpu_sampler
    return sample(lambda _: call(), [[]], seconds, rounds)


def _cpu_sampler(call: Callable[[Any], None], sets: Sequence[Any], seconds: float, rounds: int) -> Measured:
    call(sets[0])
    start = time.perf_counter()
    call(sets[-1])
    once = max(time.perf_counter() - start, 1e-7)
    repeats = max(1, int(seconds / rounds / once))
    samples, place = [], 0
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(repeats):
            call(sets[place])
            place = (place + 1) % len(sets)
        samples.append((time.perf_counter() - start) / repeats * 1e6)
    return summarize(samples)


def _cuda_sampler(call: Callable[[Any], None], sets: Sequence[Any], seconds: float, rounds: int) -> Measured:
    stream = torch.cuda.Stream()
    # The arguments were written on the current stream. A call that overtook those writes would take what the memory held
    # before for indices, and read wherever they point.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for arguments in sets[:3]:
            call(arguments)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        calls = max(len(sets), 20)
        with torch.cuda.graph(graph, stream=stream):
            for index in range(calls):
                call(sets[index % len(sets)])
        graph.replay()
        stream.synchronize()
        samples = []
        for _ in range(rounds):
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record(stream)
            graph.replay()
            after.record(stream)
            stream.synchronize()
            samples.append(before.elapsed_time(after) * 1e3 / calls)
    return summarize(samples)


def _cuda_eager_sampler(call: Callable[[Any], None], sets: Sequence[Any], seconds: float, rounds: int) -> Measured:
    for arguments in sets[:3]:
        call(arguments)
    torch.cuda.synchronize()
    samples, calls = [], max(len(sets), 20)
    for _ in range(rounds):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        for index in range(calls):
            call(sets[index % len(sets)])
        after.record()
        after.synchronize()
        samples.append(before.elapsed_time(after) * 1e3 / calls)
    return summarize(samples)


def timing_policy(kernel: Kernel, device: str) -> str:
    """How `measure` calls `kernel`: part of a timing record's key."""
    return "graph,cold" if device.startswith("cuda") and kernel.capturable else "eager,cold"


def summarize(samples: Sequence[float]) -> Measured:
    """Median and relative interquartile spread."""
    middle = statistics.median(samples)
    low, _, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else (middle, middle, middle)
    return Measured(middle, (high - low) / middle if middle else 0.0, tuple(samples))


def _copy(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.clone()
    if isinstance(argument, list):
        return [_copy(item) for item in argument]
    return argument
