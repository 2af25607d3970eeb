"""Warm-up: what the steps of an engine call is selected, verified, compiled, loaded and captured before the first request.

Steps are recorded first, without running, with one layer of each kind (`layer_kinds`). The kernels that they need are selected, those without a
record verified, and so compiled, by several processes at a time, and then loaded. On a GPU they also run, on an unused cache. With one layer of each
kind: prompts of each bucket of tokens, from their beginning and after cached tokens, with other sequences in the step, and the logits and samples of
each bucket of rows; those of a bucket between two powers of two only if they call a kernel, in a configuration, that has not run yet. With all
layers: decode steps of each number of sequences and each bound of the context that has a graph, with and without drafts if the engine drafts, and
the steps with prompts that have one. What a step of the engine can meet within its limits has then run once. On a CPU nothing is compiled or
captured, so steps run only where `Engine.warm_up` asks for it.

Triton compiles a kernel again for pointers that are not multiples of 16 bytes, and for integers that are 1 or multiples of 16. Every tensor of a
step is therefore aligned (`send_parts`, `send_arrays`, `DecodeInputs`), and kernels whose arguments depend on the batch declare them as
``do_not_specialize``: what the verification compiled serves all steps. Afterwards the plans of the model report a kernel that is selected
late.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor

from gristmill.autotune.bound import BoundPlan
from gristmill.autotune.resolve import Resolver
from gristmill.kernel_registry.plan import BUCKETS, bucket_sizes
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernel_registry.select import Candidate
from gristmill.runtime.layer_kinds import repeated_layers
from gristmill.runtime.layers.gathered_context import MOST_BLOCKS
from gristmill.runtime.layers.mla import LARGEST_EXPANDED
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.logprobs import ROWS as PROMPT_ROWS
from gristmill.runtime.progress import Progress
from gristmill.runtime.prompt_graphs import PromptGraphs
from gristmill.runtime.runner import Runner
from gristmill.runtime.sampler import SamplingRow
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import ScheduledRequest, SchedulerConfig
from gristmill.runtime.speculation.hidden_drafts import HiddenStateModel
from gristmill.runtime.verify_ahead import workers_for

Step = Callable[[], object]
Calls = list[tuple[BoundPlan, int]]
"""Plans that steps call, each with the bucket of a call."""


@dataclass(slots=True, eq=False)
class Rehearsal:
    """A step that is no decode step.

    Attributes:
        between: its size is a bucket between two powers of two, and not the largest that is possible.
        calls: what it calls, once it has been recorded.
    """

    step: Step
    between: bool
    calls: Calls | None = None

    def run(self) -> None:
        """Run the step, unless it is one between others and its kernels have run."""
        if self.between and self.calls is not None and all(plan.has_run(index) for plan, index in self.calls):
            return
        self.step()


_ROW = SamplingRow(SamplingParams(temperature=1.0, top_p=0.9, top_k=40), 0, 0)


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What a warm-up did.

    Attributes:
        seconds: by phase, in the order of time. ``weights``: loading, where the engine warmed up at load; ``selection`` of kernels;
            ``verification`` of those without a record, in child processes, which compile them; ``compilation``: kernels are
            loaded, and steps run that compile what is left; ``graphs``: decode steps and steps with prompts run and are captured.
        graphs: number of decode graphs that exist now, and of steps with prompts that are captured in pieces; graph_bytes: the memory that they take.
        kernels: number of plan entries that are resolved.
        verified: number of kernels, configurations and problems that were verified, for want of a record.
        compiled, reused: kernels that Triton compiled in this process, and found compiled in its cache, at load; verification compiles in others.
        ran: whether steps of every kind have run; if not, kernels are selected, verified and loaded.
    """

    seconds: dict[str, float]
    graphs: int
    kernels: int
    verified: int = 0
    graph_bytes: int = 0
    ran: bool = True
    compiled: int = 0
    reused: int = 0

    def with_draft_model(self, other: WarmUp) -> WarmUp:
        """This warm-up and that of the draft model, as one."""
        seconds = self.seconds | {f"draft model: {phase}": time for phase, time in other.seconds.items()}
        return WarmUp(
            seconds,
            self.graphs + other.graphs,
            self.kernels + other.kernels,
            self.verified + other.verified,
            self.graph_bytes + other.graph_bytes,
            self.ran and other.ran,
        )

    def __str__(self) -> str:
        """In one line, for people."""
        phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self.seconds.items())
        graphs = f", {self.graphs} graphs ({self.graph_bytes / 1e6:.0f} MB)" if self.graphs else ""
        triton = (
            f", {self.reused} of Triton reused and {self.compiled} compiled"
            if self.reused or self.compiled
            else ""
        )
        return (
            f"warm in {sum(self.seconds.values()):.1f} s ({phases}): {self.kernels} kernels, "
            f"{self.verified} verified now{triton}{graphs}"
        )


class Phases:
    """The phases of a warm-up: each is timed, with what a GPU still computes, and reported.

    Attributes:
        seconds: by phase, in the order of time.
    """

    def __init__(self, device: torch.device, progress: Progress | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._device, self._progress = device, progress

    @contextmanager
    def __call__(self, name: str, total: int = 0) -> Iterator[Callable[[int], None]]:
        """A phase of `total` steps; yields what is called with the number of those that are done."""

        def report(done: int) -> None:
            if self._progress is not None:
                self._progress(name, done, total)

        begin = time.perf_counter()
        report(0)
        yield report
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds[name] = time.perf_counter() - begin


def select_and_verify(
    plans: Plans, record: Callable[[], Calls], phase: Phases, workers: int | None = None
) -> list[Step]:
    """Select the kernels of the calls that `record` returns, and verify those without a record. Returns what loads them."""
    with phase("selection"):
        chosen = {call: verified(plans.resolver, *call) for call in record()}
    todo = [call for call, candidate in chosen.items() if candidate is None]
    with phase("verification", len(todo)) as report:
        problems = [(plan.op, plan.problem(index), plan.layouts) for plan, index in todo]
        plans.resolver.resolve_all(problems, workers or workers_for(plans.device), report)
    return [
        partial(load_entry, plan, index) if candidate is None else partial(plan.take, index, candidate)
        for (plan, index), candidate in chosen.items()
    ]


def resolved_entries(plans: Plans) -> int:
    """Entries of all plans that have a kernel."""
    return sum(entry is not None for plan in plans.bound.values() for entry in plan.entries)


def warm_up(
    runner: Runner,
    config: SchedulerConfig,
    progress: Progress | None = None,
    workers: int | None = None,
    drafts: int = 0,
    run: bool = True,
) -> WarmUp:
    """Prepare every kind of step. No request may be unfinished: the cache is written over.

    From then on a kernel that is selected while requests wait is reported by a RuntimeWarning.

    Args:
        workers: processes that verify kernels at a time; None = by the machine.
        drafts: the most drafts per request and step of an engine that verifies drafts; its steps with drafts run with as many.
        run: run the steps; False = kernels are selected, verified and loaded.
    """
    plans, phase = runner.model.plans, Phases(runner.device, progress)
    tried = plans.resolver.tried
    plans.set_warm(False)
    rehearsals = _compiling(runner, config, drafts)
    record = partial(_recorded, runner, config, drafts, rehearsals)
    try:
        steps = select_and_verify(plans, record, phase, workers)
        if run:
            ordered = sorted(rehearsals, key=attrgetter("between"))
            # Ranks run the same steps, whatever has run in their processes before.
            steps += [one.run if plans.mesh.world == 1 else one.step for one in ordered]
        _run(steps, phase, "compilation")
    finally:
        runner.left_out = frozenset()
    if run:
        _run(_capturing(runner, config, drafts), phase, "graphs")
    plans.set_warm(True)
    entries = resolved_entries(plans)
    graphs = [] if runner.decode is None else [g for g in runner.decode.graphs.values() if not g.reason]
    pieces = [] if runner.prompts is None else [g for g in runner.prompts.graphs.values() if not g.reason]
    return WarmUp(
        phase.seconds,
        len(graphs) + len(pieces),
        entries,
        plans.resolver.tried - tried,
        runner.graph_bytes,
        run,
    )


def _run(steps: Sequence[Step], phase: Phases, name: str) -> None:
    """Run the steps of a phase."""
    with phase(name, len(steps)) as report:
        for done, step in enumerate(steps, 1):
            step()
            report(done)


def _compiling(runner: Runner, config: SchedulerConfig, drafts: int) -> list[Rehearsal]:
    """Steps with prompts, and what else is no decode step."""
    rehearsals = [*_prompts(runner, config)]
    if isinstance(runner.model, HiddenStateModel):
        rehearsals += _states(runner.model, config)
    return [*rehearsals, *_logprobs(runner, config, drafts), *_samples(runner, config, drafts)]


def _capturing(runner: Runner, config: SchedulerConfig, drafts: int) -> list[Step]:
    """Decode steps, those that verify drafts, and steps with prompts of the sizes of graphs. What `graph_memory` does not hold is left out from
    the end."""
    prompts = [] if runner.prompts is None else _prompt_graphs(runner.prompts, runner, config)
    return [
        *_decode_steps(runner, config),
        *(_decode_steps(runner, config, drafts) if drafts else ()),
        *prompts,
    ]


def _recorded(runner: Runner, config: SchedulerConfig, drafts: int, rehearsals: Sequence[Rehearsal]) -> Calls:
    """The plans that the rehearsals and the steps of graphs call, each with the buckets of its calls. Those of a rehearsal are kept there. From then
    on the runner leaves repeated layers out."""
    # Steps of graphs call the same kernels, in fewer kinds of steps.
    graphs, runner.decode, prompts, runner.prompts = runner.decode, None, runner.prompts, None
    found: dict[tuple[BoundPlan, int], None] = {}
    try:
        runner.left_out = repeated_layers(runner, rehearsals[0].step) if rehearsals else frozenset()
        with runner.model.plans.recorded() as calls:
            for rehearsal in reversed(rehearsals):  # kernels of sampling take longest to compile
                rehearsal.step()
                rehearsal.calls = [*calls]
                found |= calls
                calls.clear()
            for step in _capturing(runner, config, drafts):
                step()
            found |= calls
    finally:
        runner.decode, runner.prompts = graphs, prompts
    return [*found]


def verified(resolver: Resolver, plan: BoundPlan, index: int) -> Candidate | None:
    """The kernel of a bucket, if it has a record; None, too, if another process chooses."""
    if resolver.chooser is not None:
        return None
    best = resolver.select(plan.op, plan.problem(index), plan.layouts).best
    return best if best is not None and best.verdict == "selected" else None


def load_entry(plan: BoundPlan, index: int) -> None:
    """Resolve and load the kernel of a bucket."""
    plan.prepare([bucket_sizes()[index]])


def sizes_up_to(most: int) -> list[int]:
    """A size in each bucket up to that of `most`, the largest one that is possible."""
    return [*(size for size in BUCKETS if size < most), most]


def _is_between(size: int, most: int) -> bool:
    """Whether one of `sizes_up_to` lies between two powers of two."""
    return size < most and size & (size - 1) != 0


def _decode_sizes(runner: Runner, most: int) -> list[int]:
    """A number of sequences for each graph and each bucket, up to `most`."""
    if runner.decode is None:
        return sizes_up_to(most)
    sizes, largest = runner.decode.sizes, runner.decode.largest
    return [*(size for size in sizes if size < most), *(b for b in BUCKETS if largest < b < most), most]


def _sequence(start: int, count: int, config: SchedulerConfig, drafts: int = 0) -> ScheduledRequest:
    """A sequence over the first blocks of the cache, the same in each group."""
    blocks = [block for block in range(cdiv(start + count, config.block_size)) for _ in config.windows]
    return ScheduledRequest("warm-up", start, count, True, [0] * count, blocks, [], drafts)


def _prompt_graphs(prompts: PromptGraphs, runner: Runner, config: SchedulerConfig) -> Iterator[Step]:
    """A step for each graph of `PromptGraphs`, largest first: later ones use the memory of the first."""
    longest = min(config.max_chunk or config.max_batch_tokens, config.capacity)
    most = min(config.max_batch_tokens, longest * config.max_seqs)
    for size in sorted({min(size, most) for size in prompts.sizes}, reverse=True):
        lengths = [longest] * (size // longest) + [size % longest] * (size % longest > 0)
        entries = [_sequence(0, count, config) for count in lengths]
        yield partial(_launch, runner, entries, [_ROW] * len(entries))


def _launch(runner: Runner, entries: list[ScheduledRequest], rows: list[SamplingRow]) -> None:
    """Launch a step, for whose results nobody waits: the device computes it while the host makes the next one."""
    runner.drop(runner.launch(entries, rows))


def _launch_unpadded(runner: Runner, entries: list[ScheduledRequest], rows: list[SamplingRow]) -> None:
    """Launch a step without `PromptGraphs`."""
    prompts, runner.prompts = runner.prompts, None
    try:
        _launch(runner, entries, rows)
    finally:
        runner.prompts = prompts


def _prompts(runner: Runner, config: SchedulerConfig) -> Iterator[Rehearsal]:
    """Steps with prompts: of as many tokens as each bucket has, in as few sequences as the limits allow."""
    block = config.block_size
    room = config.capacity
    cached = min(block, room - 1)
    longest = min(config.max_chunk or config.max_batch_tokens, room - cached)
    mla = runner.model.config.mla

    def step(lengths: list[int], start: int) -> None:
        # Kernel by kernel: a graph may be left out for want of memory.
        _launch_unpadded(
            runner, [_sequence(start, count, config) for count in lengths], [_ROW] * len(lengths)
        )

    def steps(size: int) -> Iterator[Step]:
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

    most = min(config.max_batch_tokens, longest * config.max_seqs)
    for size in sizes_up_to(most):
        yield from (Rehearsal(one, _is_between(size, most)) for one in steps(size))
    if runner.model.plans.mesh.context_parallel:  # contexts of so many blocks come from all ranks
        for blocks in sizes_up_to(MOST_BLOCKS):
            start = max(block, block * blocks - longest)
            if start < block * blocks <= room:
                yield Rehearsal(partial(step, [block * blocks - start], start), False)


def _decode_steps(runner: Runner, config: SchedulerConfig, drafts: int = 0) -> Iterator[Step]:
    """Steps with one new token and `drafts` drafts per sequence, and the graphs of those that have one."""
    room = config.capacity
    count = 1 + drafts
    if count > min(room, config.max_batch_tokens):
        return
    for seqs in _decode_sizes(runner, min(config.max_seqs, config.max_batch_tokens // count)):
        context, more = min(1 + count, room), True
        while more:
            entries = [_sequence(context - count, count, config, drafts)] * seqs
            yield partial(_launch_unpadded, runner, entries, [_ROW] * (seqs * count))
            if runner.decode is None or runner.decode.why_not(entries):
                break
            bound = runner.decode.bound(context)
            more, context = bound < room, min(bound + 1, room)


def _states(model: HiddenStateModel, config: SchedulerConfig) -> Iterator[Rehearsal]:
    """What a model that drafts from hidden states makes of the target's, for each bucket of tokens."""
    width = model.config.hidden_size * max(1, len(model.target_layers))

    @torch.inference_mode()
    def step(tokens: int) -> None:
        model.states(torch.zeros(tokens, width, dtype=model.plans.dtype, device=model.plans.device))

    return _of_sizes(step, config.max_batch_tokens)


def _samples(runner: Runner, config: SchedulerConfig, drafts: int) -> Iterator[Rehearsal]:
    """Samples of the logits of rows of prompts, and of processed logits, which are float32."""

    @torch.inference_mode()
    def step(rows: int) -> None:
        logits = _logits(runner, rows)
        runner.sampler.sample(logits, [_ROW] * rows)
        runner.sampler.sample(runner.processors.rehearse(logits), [_ROW] * rows)

    return _of_sizes(step, _most_rows(config, drafts))


def _logprobs(runner: Runner, config: SchedulerConfig, drafts: int) -> Iterator[Rehearsal]:
    """Log-probabilities of tokens that are sampled, and of those of prompts."""

    @torch.inference_mode()
    def step(rows: int) -> None:
        runner.logprob_reader.rehearse(_logits(runner, rows))

    return _of_sizes(step, max(_most_rows(config, drafts), min(PROMPT_ROWS, config.max_batch_tokens)))


def _of_sizes(step: Callable[[int], None], most: int) -> Iterator[Rehearsal]:
    """A rehearsal for each of `sizes_up_to`."""
    return (Rehearsal(partial(step, size), _is_between(size, most)) for size in sizes_up_to(most))


def _most_rows(config: SchedulerConfig, drafts: int) -> int:
    """The most rows that a step samples."""
    return min(config.max_seqs * (1 + drafts), config.max_batch_tokens)


def _logits(runner: Runner, rows: int) -> Tensor:
    """The logits of so many hidden states."""
    model = runner.model
    hidden = torch.zeros(rows, model.config.hidden_size, dtype=model.plans.dtype, device=runner.device)
    return model.logits(hidden)
