"""Warm-up: what the steps of an engine call is selected, verified, compiled, loaded and captured before the first request.

Steps are recorded first, without running: the kernels that they need are verified, and so compiled, by several processes at a time.
Then they run on an unused cache: prompts of each bucket of tokens, from their beginning and after cached tokens, with other
sequences in the step; decode steps of each number of sequences and each bound of the context that has a graph, with and without
drafts if the engine drafts; and the logits and samples of each bucket of rows. What a step of the engine can meet within its limits
has then run once.

Triton compiles a kernel again for pointers that are not multiples of 16 bytes, and for integers that are 1 or multiples of 16. Every tensor of a
step is therefore aligned (`send_parts`, `DecodeInputs`), and kernels whose arguments depend on the batch declare them as
``do_not_specialize``: what the verification compiled serves all steps. Afterwards the plans of the model report a kernel that is selected
late. Graphs for steps with processed logits are captured when needed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from gristmill.kernel_registry.plan import BUCKETS
from gristmill.kernel_registry.scheme import cdiv
from gristmill.runtime.decode_graphs import LARGEST, SIZES
from gristmill.runtime.layers.mla import LARGEST_EXPANDED
from gristmill.runtime.runner import Runner
from gristmill.runtime.sampler import SamplingRow
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import ScheduledRequest, SchedulerConfig
from gristmill.runtime.speculation.hidden_drafts import HiddenStateModel

Progress = Callable[[str, int, int], None]
"""Called with a stage, its steps done, and its steps in all."""

MOST_WORKERS = 8
"""Processes that verify kernels on one GPU at a time."""
WORKER_BYTES = 2 << 30
"""Free memory of a GPU for each of them."""

_ROW = SamplingRow(SamplingParams(temperature=1.0, top_p=0.9, top_k=40), 0, 0)


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What a warm-up did.

    Attributes:
        seconds: by stage, in the order of time.
        graphs: number of decode graphs that exist now.
        kernels: number of plan entries that are resolved.
    """

    seconds: dict[str, float]
    graphs: int
    kernels: int

    def with_draft_model(self, other: WarmUp) -> WarmUp:
        """This warm-up and that of the draft model, as one."""
        seconds = self.seconds | {f"draft model: {stage}": time for stage, time in other.seconds.items()}
        return WarmUp(seconds, self.graphs + other.graphs, self.kernels + other.kernels)


def warm_up(
    runner: Runner,
    config: SchedulerConfig,
    progress: Progress | None = None,
    workers: int | None = None,
    drafts: int = 0,
) -> WarmUp:
    """Run every kind of step once. No request may be unfinished: the cache is written over.

    From then on a kernel that is selected while requests wait is reported by a RuntimeWarning.

    Args:
        workers: processes that verify kernels at a time; None = by the machine.
        drafts: the most drafts per request and step of an engine that verifies drafts; its steps with drafts run with as many.
    """
    plans = runner.model.plans
    plans.set_warm(False)
    seconds = {}
    begin = time.perf_counter()
    _verify(runner, lambda: _stages(runner, config, drafts), workers, progress)
    seconds["kernels"] = time.perf_counter() - begin
    for stage, steps in _stages(runner, config, drafts).items():
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
    graphs = [] if runner.decode is None else [g for g in runner.decode.graphs.values() if not g.reason]
    return WarmUp(seconds, len(graphs), entries)


def _stages(runner: Runner, config: SchedulerConfig, drafts: int) -> dict[str, list[Callable[[], object]]]:
    """The steps to run, by stage."""
    stages = {
        "prompts": list(_prompts(runner, config)),
        "decode steps": list(_decode_steps(runner, config)),
    }
    if drafts:
        stages["verified steps"] = list(_decode_steps(runner, config, drafts))
    if isinstance(runner.model, HiddenStateModel):
        stages["hidden states"] = list(_states(runner.model, config))
    return stages | {"sampling": list(_samples(runner, config, drafts))}


def _verify(
    runner: Runner,
    stages: Callable[[], dict[str, list[Callable[[], object]]]],
    workers: int | None,
    progress: Progress | None,
) -> None:
    """Verify the kernels that the steps of the stages call."""
    graphs, runner.decode = runner.decode, None  # whose steps call the same kernels, in fewer kinds of steps
    try:
        with runner.model.plans.recorded() as calls:
            for steps in reversed(stages().values()):  # kernels of sampling take longest to compile
                for step in steps:
                    step()
    finally:
        runner.decode = graphs
    problems = [(plan.op, plan.problem(index), plan.layouts) for plan, index in calls]
    resolver = runner.model.plans.resolver

    def done(count: int) -> None:
        if progress is not None:
            progress("kernels", count, len(problems))

    done(0)
    resolver.resolve_all(problems, workers or _workers(runner.device), done)


def _workers(device: torch.device) -> int:
    """Processes that verify at a time: on a GPU one for every second core, with room for a context and a problem each."""
    if device.type == "cpu":
        return 1
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0)) // 2, free // WORKER_BYTES))


def _sizes(most: int) -> list[int]:
    """A size in each bucket up to that of `most`, the largest one that is possible."""
    return [*(size for size in BUCKETS if size < most), most]


def _decode_sizes(runner: Runner, most: int) -> list[int]:
    """A number of sequences for each graph and each bucket, up to `most`."""
    if runner.decode is None:
        return _sizes(most)
    return [*(size for size in SIZES if size < most), *(b for b in BUCKETS if LARGEST < b < most), most]


def _sequence(start: int, count: int, config: SchedulerConfig, drafts: int = 0) -> ScheduledRequest:
    """A sequence over the first blocks of the cache, the same in each group."""
    blocks = [block for block in range(cdiv(start + count, config.block_size)) for _ in config.windows]
    return ScheduledRequest("warm-up", start, count, True, [0] * count, blocks, [], drafts)


def _prompts(runner: Runner, config: SchedulerConfig) -> Iterator[Callable[[], object]]:
    """Steps with prompts: of as many tokens as each bucket has, in as few sequences as the limits allow."""
    block = config.block_size
    room = config.capacity
    cached = min(block, room - 1)
    longest = min(config.max_chunk or config.max_batch_tokens, room - cached)
    mla = runner.model.config.mla

    def step(lengths: list[int], start: int) -> None:
        runner.run([_sequence(start, count, config) for count in lengths], [_ROW] * len(lengths))

    for size in _sizes(min(config.max_batch_tokens, longest * config.max_seqs)):
        lengths = [longest] * (size // longest) + [size % longest] * (size % longest > 0)
        yield partial(step, lengths, 0)
        if mla is not None:  # whose attention has forms for few tokens of a sequence, and for many keys
            seqs = min(config.max_seqs, size)
            yield partial(step, [size // seqs + (i < size % seqs) for i in range(seqs)], cached)
            many = LARGEST_EXPANDED // runner.model.config.num_heads
            if many + longest <= room:
                yield partial(step, lengths, many)
        if cached:
            yield partial(step, lengths, cached)
            singles = min(config.max_seqs - len(lengths), lengths[0] - 1, 4)
            if singles > 0:  # decode steps next to the prompt
                mixed = [lengths[0] - singles, *lengths[1:], *([1] * singles)]
                yield partial(step, mixed, cached)


def _decode_steps(runner: Runner, config: SchedulerConfig, drafts: int = 0) -> Iterator[Callable[[], object]]:
    """Steps with one new token and `drafts` drafts per sequence, and the graphs of those that have one."""
    room = config.capacity
    count = 1 + drafts
    if count > min(room, config.max_batch_tokens):
        return
    for seqs in _decode_sizes(runner, min(config.max_seqs, config.max_batch_tokens // count)):
        context, more = min(1 + count, room), True
        while more:
            entries = [_sequence(context - count, count, config, drafts)] * seqs
            yield partial(runner.run, entries, [_ROW] * (seqs * count))
            if runner.decode is None or runner.decode.why_not(entries):
                break
            bound = runner.decode.bound(context)
            more, context = bound < room, min(bound + 1, room)


def _states(model: HiddenStateModel, config: SchedulerConfig) -> Iterator[Callable[[], object]]:
    """What a model that drafts from hidden states makes of the target's, for each bucket of tokens."""
    width = model.config.hidden_size * max(1, len(model.target_layers))

    @torch.inference_mode()
    def step(tokens: int) -> None:
        model.states(torch.zeros(tokens, width, dtype=model.plans.dtype, device=model.plans.device))

    for tokens in _sizes(config.max_batch_tokens):
        yield partial(step, tokens)


def _samples(runner: Runner, config: SchedulerConfig, drafts: int) -> Iterator[Callable[[], object]]:
    """Logits and samples of rows of prompts, and samples of processed logits, which are float32."""
    model = runner.model

    @torch.inference_mode()
    def step(rows: int) -> None:
        hidden = torch.zeros(rows, model.config.hidden_size, dtype=model.plans.dtype, device=runner.device)
        logits = model.logits(hidden)
        for values in (logits, logits.float()):
            runner.sampler(values, [_ROW] * rows)

    for rows in _sizes(min(config.max_seqs * (1 + drafts), config.max_batch_tokens)):
        yield partial(step, rows)
