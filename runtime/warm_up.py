"""Warm-up: what the steps of an engine call is selected, verified, compiled, loaded and captured before the first request.

It runs steps on a cache that nobody uses: prompts of each bucket of tokens, from their beginning and behind cached tokens with other
sequences beside them; decode steps of each number of sequences and each bound of the context that has a graph; and the logits and
samples of each bucket of rows. What a step of the engine can meet within its limits has then run once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from gristmill.kernel_registry.plan import BUCKETS
from gristmill.kernel_registry.scheme import cdiv
from gristmill.runtime.runner import Runner
from gristmill.runtime.sampler import SamplingRow
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import ScheduledRequest, SchedulerConfig

Progress = Callable[[str, int, int], None]
"""Called with a stage, its steps done, and its steps in all."""

_ROW = SamplingRow(SamplingParams(temperature=1.0, top_p=0.9, top_k=40), 0, 0)


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What a warm-up did. seconds: by stage, in the order of time. graphs: decode graphs that exist now. kernels: plan entries that
    are resolved."""

    seconds: dict[str, float]
    graphs: int
    kernels: int


def warm_up(runner: Runner, config: SchedulerConfig, progress: Progress | None = None) -> WarmUp:
    """Run every kind of step once. No request may be unfinished: the cache is written over.

    From then on a kernel that is selected while requests wait is reported by a RuntimeWarning.
    """
    plans = runner.model.plans
    plans.set_warm(False)
    stages: dict[str, list[Callable[[], object]]] = {
        "prompts": list(_prompts(runner, config)),
        "decode steps": list(_decode_steps(runner, config)),
        "sampling": list(_samples(runner, config)),
    }
    seconds = {}
    for stage, steps in stages.items():
        begin = time.perf_counter()
        for done, step in enumerate(steps):
            if progress is not None:
                progress(stage, done, len(steps))
            step()
        if runner.device.type == "cuda":
            torch.cuda.synchronize(runner.device)
        if progress is not None:
            progress(stage, len(steps), len(steps))
        seconds[stage] = time.perf_counter() - begin
    plans.set_warm(True)
    entries = sum(entry is not None for plan in plans.bound.values() for entry in plan.entries)
    return WarmUp(seconds, 0 if runner.decode is None else len(runner.decode.graphs), entries)


def _sizes(most: int) -> list[int]:
    """A size in each bucket up to that of `most`, the largest one that is possible."""
    return [*(size for size in BUCKETS if size < most), most]


def _sequence(start: int, count: int, block_size: int) -> ScheduledRequest:
    """A sequence over the first blocks of the cache."""
    blocks = list(range(cdiv(start + count, block_size)))
    return ScheduledRequest("warm-up", start, count, True, [0] * count, blocks, [])


def _prompts(runner: Runner, config: SchedulerConfig) -> Iterator[Callable[[], object]]:
    """Steps with prompts: of as many tokens as each bucket has, in as few sequences as the limits allow."""
    block = config.block_size
    room = config.capacity
    cached = min(block, room - 1)
    longest = min(config.max_chunk or config.max_batch_tokens, room - cached)

    def step(lengths: list[int], start: int) -> None:
        runner.run([_sequence(start, count, block) for count in lengths], [_ROW] * len(lengths))

    for size in _sizes(min(config.max_batch_tokens, longest * config.max_seqs)):
        lengths = [longest] * (size // longest) + [size % longest] * (size % longest > 0)
        yield partial(step, lengths, 0)
        if cached:
            yield partial(step, lengths, cached)
            singles = min(config.max_seqs - len(lengths), lengths[0] - 1, 4)
            if singles > 0:  # decode steps beside the prompt
                mixed = [lengths[0] - singles, *lengths[1:], *([1] * singles)]
                yield partial(step, mixed, cached)


def _decode_steps(runner: Runner, config: SchedulerConfig) -> Iterator[Callable[[], object]]:
    """Steps with one new token per sequence, and the graphs of those that have one."""
    block = config.block_size
    room = config.capacity
    for seqs in _sizes(min(config.max_seqs, config.max_batch_tokens)):
        context, more = min(2, room), True
        while more:
            entries = [_sequence(context - 1, 1, block)] * seqs
            yield partial(runner.run, entries, [_ROW] * len(entries))
            if runner.decode is None or runner.decode.why_not(entries):
                break
            bound = runner.decode.bound(context)
            more, context = bound < room, min(bound + 1, room)


def _samples(runner: Runner, config: SchedulerConfig) -> Iterator[Callable[[], object]]:
    """Logits and samples of rows of prompts, and samples of processed logits, which are float32."""
    model = runner.model

    @torch.inference_mode()
    def step(rows: int) -> None:
        hidden = torch.zeros(rows, model.config.hidden_size, dtype=model.plans.dtype, device=runner.device)
        logits = model.logits(hidden)
        for values in (logits, logits.float()):
            runner.sampler(values, [_ROW] * rows)

    for rows in _sizes(config.max_seqs):
        yield partial(step, rows)
