"""Decode steps as CUDA graphs: one new token per sequence, or one and its drafts; one launch runs everything from the embedding to the
sampled ids.

Two such steps differ only in their inputs. One copy writes these into buffers at fixed addresses, and a graph that was captured
over the buffers is replayed. There is one graph per number of sequences in `SIZES` and per bound of the context, each `GROWTH` times the
one before it, because launches are sized by bounds that the host knows (for example, the number of parts of a context in split attention), and so
are the block tables that a step copies. Attention that takes as long for any bound has no graphs for the smallest one. A step
uses the smallest graph that fits; padding slots read token 0 at position 0 and write nothing. A token that the step before
has sampled is read on the device, from the row of its request, and the sampled ids are written there. The logits stay in one buffer that all
graphs share, until the next step: rows that are processed (penalties, bans, grammars) are sampled again from there. A step that verifies
drafts uses a graph of the engine's most tokens per sequence; sequences with fewer are padded at their end.

A graph is captured when a step first needs it. The first step of a kind runs once before, which resolves and loads its kernels and sizes their
workspaces. Others do only if they call a kernel that has not run yet, or need a larger workspace: after a warm-up, which has run the kernels, few
do. Ranks always run a step before, together. On a CPU the second step is recorded as it runs (`RecordedStep`), and those after it replay the
record; by default there are only such of the sizes in `CPU_SIZES`. A graph for which there is no memory, or which goes over the bound of
`graph_memory`, is left out: its steps run kernel by kernel.

Layers share workspaces: one per stream, and one per kernel that needs zeroed memory and leaves it zeroed. A graph holds the workspaces that it
was captured with. ``gristmill generate --explain`` prints which steps ran how, and why.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from gristmill.autotune.captures import capturing_on
from gristmill.autotune.errors import UnpreparedError
from gristmill.kernel_registry.plan import BUCKETS, bucket_index
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernels.attention.bounds import takes_any_bound
from gristmill.kernels.call_list import UnrecordableError
from gristmill.runtime.batch import shard_context
from gristmill.runtime.decode_inputs import Buffers, DecodeInputs, RowState
from gristmill.runtime.errors import is_out_of_memory
from gristmill.runtime.graph_memory import (
    ELSEWHERE,
    NO_MEMORY,
    OVER_BOUND,
    GraphMemory,
    run_and_capture,
    together,
    why_not_captured,
)
from gristmill.runtime.hidden_states import KeptStates
from gristmill.runtime.kv_cache.paged import PagedCache
from gristmill.runtime.models import Model
from gristmill.runtime.recorded_step import RecordedStep, StepMemory
from gristmill.runtime.sampler import Sampler, SamplingRow
from gristmill.runtime.scheduler import ScheduledRequest
from gristmill.runtime.steps_in_flight import SampledTokens

LOG = logging.getLogger("gristmill")
_COUNT, _COUNTS = attrgetter("count"), attrgetter("count", "drafts")
_START, _SAMPLES = attrgetter("start"), attrgetter("samples")
SIZES: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 48, *(bucket for bucket in BUCKETS if 64 <= bucket <= 256))
"""Sequences of the graphs. From 64 on they are the buckets of kernels: a product runs the same kernel, with tiles for the largest size, for all
sizes of a bucket. Below, it reads the whole weight for few rows. So what padding costs is little: on an H200 at most 2.3 µs for each sequence in a
step of Qwen3-0.6B, which takes 2,100 with 64 (bench/results/h200/decode_graphs.json)."""
CPU_SIZES = tuple(range(1, 65))
"""Sequences of the steps that a CPU records by default: each number, because padding takes a CPU as long as other rows; in larger steps
the time that Python takes is small beside that of the kernels."""
LARGEST = SIZES[-1]
"""Tokens of the largest graph. In larger steps kernels are so long that their launches are hidden."""
SHORTEST = 512
"""The smallest context bound of a graph; the next one, if attention takes as long for it."""
GROWTH = 8
"""Factor from one context bound to the next. Kernels find the work of each step on the device, so a bound that is too large costs little,
while every bound takes a capture for each number of sequences."""


def padded(seqs: int, sizes: tuple[int, ...] = SIZES) -> int:
    """Sequences of the smallest graph for steps of `seqs` sequences, at most the largest of the sizes."""
    return sizes[bisect_left(sizes, seqs)]


@dataclass
class DecodeGraph:
    """Steps of `seqs` sequences with up to `per_seq` new tokens each and contexts up to `bound`.

    Attributes:
        logits: [at least seqs * per_seq, vocab], whose first rows the graph writes.
        reason: why steps cannot be captured; "" if they can, and on a CPU.
        holds: tensors that the graph uses and that must live as long as it does.
        nbytes: memory that its capture took; graphs share a pool, so one that fits in what others left takes little.
    """

    seqs: int
    bound: int
    per_seq: int
    buffers: Buffers
    logits: Tensor = field(repr=False)
    reason: str = ""
    graph: Any = None
    steps: int = 0
    has_run: bool = False
    holds: tuple[Tensor, ...] = field(default=(), repr=False)
    nbytes: int = 0

    @property
    def captured(self) -> bool:
        return self.graph is not None


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """The device's part of a decode step. `run` launches it; its result, the sampled ids, padded, is valid until the next step, and so is
    `logits` [at least rows, vocab]."""

    buffers: Buffers
    logits: Tensor
    run: Callable[[], Tensor]

    def fed(self, rows: int) -> Tensor:
        """After `run`: int64 [rows], the token whose successor each row predicts."""
        buffers = self.buffers
        if buffers.per_seq == 1:
            return buffers.tokens[:rows]
        return buffers.tokens[buffers.parts["logit_rows"][:rows]]


class DecodeGraphs:
    """The decode graphs of a model over its cache, made as steps need them.

    Args:
        most_drafts: drafts per sequence to which steps with drafts are padded, so that one graph serves them all.
        kept: the states that a step leaves in `hidden`, [LARGEST, width], of which all graphs write the first rows.
        taken: the memory that captures take; None = of its own, without another bound than the default.
        pads: whether steps are padded: to the numbers of sequences in `SIZES`, and sequences with fewer drafts than others to `most_drafts`.
            If not, there is a graph for each number of sequences in `CPU_SIZES`.
    """

    def __init__(
        self,
        model: Model,
        cache: PagedCache,
        sampler: Sampler,
        sampled: SampledTokens,
        most_drafts: int = 0,
        kept: KeptStates | None = None,
        taken: GraphMemory | None = None,
        pads: bool = True,
    ) -> None:
        self.most_drafts = most_drafts
        self.pads = pads
        self.sizes = SIZES if pads else CPU_SIZES
        self.largest = self.sizes[-1]
        self.model, self.cache, self.sampler = model, cache, sampler
        self.device = model.plans.device
        self.hidden: Tensor | None = None
        self._kept = kept
        if kept is not None:
            self.hidden = torch.zeros(self.largest, kept.width, dtype=model.plans.dtype, device=self.device)
        self.graphs: dict[tuple[int, int, int], DecodeGraph] = {}
        self.taken = taken or GraphMemory(None, self.device)
        self.refused: Counter[str] = Counter()
        self._block_size = cache.block_size * model.plans.mesh.context_ranks
        self._limit = min(model.config.max_position, cache.num_blocks * self._block_size)
        width = cdiv(self._limit, self._block_size)
        self._rows = sampled.rows
        self.state = RowState(
            max(sampled.rows, self.largest), width, sampler.vocab_size, cache.windows, cache.num_blocks
        )
        self.memory = DecodeInputs(self.largest, width, sampled, groups=len(cache.windows))
        self._logits: Tensor | None = None
        self._told_of_memory = False
        self._cuda = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if self._cuda else None
        self._pool: tuple[int, int] | None = None
        # Tokens per sequence of the kinds of steps that have run on the stream.
        self._have_run: set[int] = set()
        self._step_memory = StepMemory()  # of recorded steps, on a CPU

    def prepare(
        self, entries: Sequence[ScheduledRequest], rows: Sequence[SamplingRow], slot: int
    ) -> PreparedStep | None:
        """A decode step whose inputs are in the host memory of this slot from now on; None if no graph fits it, with the reason counted in
        `refused`.
        """
        if reason := self.why_not(entries):
            self.refused[reason] += 1
            return None
        per_seq = self._per_seq(entries)
        context = max(map(_START, entries)) + per_seq
        graph = self.graph(len(entries), context, per_seq)
        if graph.reason:
            self.refused[graph.reason] += 1
            return None
        graph.buffers.fill(slot, entries, rows, self.state, self._block_size)
        graph.steps += 1

        def run() -> Tensor:
            graph.buffers.send(slot)
            if graph.graph is not None:
                graph.graph.replay()
            elif self._cuda or graph.reason or not graph.has_run:
                self.compute(graph)
                graph.has_run = True
            else:
                self.record(graph)
            return graph.buffers.ids

        return PreparedStep(graph.buffers, graph.logits, run)

    def why_not(self, entries: Sequence[ScheduledRequest]) -> str:
        """Why a step cannot run as a graph; "" if it can."""
        counts = set(map(_COUNTS, entries))
        if any(count != 1 + drafts for count, drafts in counts):
            return "a sequence has several new tokens"
        if not all(map(_SAMPLES, entries)):
            return "a sequence is inside its prompt"
        per_seq = self._per_seq(entries)
        if not self.pads and len(counts) > 1:
            return "sequences have different numbers of drafts"
        if len(entries) > self.largest or self.padded(len(entries)) * per_seq > self.largest:
            return f"over {self.largest} " + ("sequences" if per_seq == 1 else "tokens with drafts")
        if per_seq > 1 and max(entry.start for entry in entries) + per_seq > self._limit:
            return "no room for padding after a sequence"
        return ""

    def first_rows(self, entries: Sequence[ScheduledRequest]) -> list[int]:
        """The row of each entry's first token among the hidden states of a step that runs as a graph."""
        per_seq = self._per_seq(entries)
        return [place * per_seq for place in range(len(entries))]

    def padded(self, seqs: int) -> int:
        """Sequences of the smallest graph for steps of `seqs` sequences, at most the largest."""
        return padded(seqs, self.sizes)

    def _per_seq(self, entries: Sequence[ScheduledRequest]) -> int:
        """Tokens per sequence of the graph for a step."""
        most: int = max(map(_COUNT, entries))
        return most if most == 1 or not self.pads else max(most, 1 + self.most_drafts)

    def bound(self, context: int) -> int:
        """The longest context of the graph for contexts up to `context`."""
        longest, bound = max(self._limit, context), self._shortest
        while bound < context:
            bound *= GROWTH
        return bound if 2 * bound <= longest else longest

    @cached_property
    def _shortest(self) -> int:
        """The smallest bound, from the kernels of attention that are selected when a graph is first asked for."""
        buckets = bucket_index(self.largest) + 1
        chosen = {
            plan: [entry for entry in plan.entries[:buckets] if entry is not None]
            for plan in self.model.plans.bound.values()
            if plan.op.name.endswith("_attention")
        }
        balanced = all(
            entries
            and all(
                takes_any_bound(one.kernel, one.config, plan.static, 1 + self.most_drafts) for one in entries
            )
            for plan, entries in chosen.items()
        )
        return SHORTEST * GROWTH if chosen and balanced else SHORTEST

    def graph(self, seqs: int, context: int, per_seq: int = 1) -> DecodeGraph:
        """The graph for steps of `seqs` sequences with `per_seq` new tokens and contexts up to `context`; made if there is none."""
        key = (self.padded(seqs), self.bound(context), per_seq)
        if key not in self.graphs:
            self.graphs[key] = self._make(*key)
        return self.graphs[key]

    def explain(self) -> list[dict[str, Any]]:
        """A row for each graph, {"seqs", "tokens_per_seq", "max_ctx", "captured", "bytes", "steps", "reason"}, and one for each
        kind of step without a graph, whose first three are None. bytes: what its capture took, beside those before it."""
        rows: list[tuple[Any, ...]] = [
            (g.seqs, g.per_seq, g.bound, g.captured, g.nbytes, g.steps, g.reason)
            for g in self.graphs.values()
        ]
        rows += [(None, None, None, False, 0, count, reason) for reason, count in self.refused.items()]
        names = ("seqs", "tokens_per_seq", "max_ctx", "captured", "bytes", "steps", "reason")
        return [dict(zip(names, row, strict=True)) for row in rows]

    def _logits_buffer(self, rows: int) -> Tensor:
        """The buffer of logits, with at least this many rows. It is as large as the engine's largest graph, so that no other is needed."""
        if self._logits is None or len(self._logits) < rows:
            most = self.padded(min(self.memory.sampled.rows, self.largest)) * (1 + self.most_drafts)
            shape = (max(rows, min(most, self.largest)), self.model.config.vocab_size)
            self._logits = torch.zeros(shape, dtype=self.model.plans.dtype, device=self.device)
        return self._logits

    @torch.inference_mode()
    def _make(self, seqs: int, bound: int, per_seq: int) -> DecodeGraph:
        buffers = Buffers(seqs, cdiv(bound, self._block_size), self.memory, per_seq)
        made = DecodeGraph(seqs, bound, per_seq, buffers, self._logits_buffer(seqs * per_seq))
        if self._stream is None:
            return made
        if self.taken.is_full:
            made.reason = OVER_BOUND
            return made
        reason, failure = why_not_captured(partial(self._capture, made, self._stream))
        if reason := self.taken.settled(reason):
            self._give_up(made, reason)
        if reason == OVER_BOUND:
            self._tell_of_bound(made)
        elif reason == NO_MEMORY:
            self._tell_of_memory(made, failure or ELSEWHERE)
        return made

    def _give_up(self, made: DecodeGraph, reason: str) -> None:
        """Run the steps of this graph without it, and give back what its capture took."""
        self.taken.give_back(made.nbytes)
        made.graph, made.reason, made.holds, made.nbytes = None, reason, (), 0
        if self._stream is not None:
            torch.cuda.empty_cache()

    def _capture(self, made: DecodeGraph, stream: torch.cuda.Stream) -> None:
        """Capture the step of a graph on the stream, for which the current one waits, after a run where one is needed."""
        current = torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                made.buffers.clear()
            at_once = made.per_seq in self._have_run and self.model.plans.mesh.world == 1
            run_and_capture(
                partial(self._run_before, made, stream),
                partial(self._capture_with_room, made, stream),
                at_once,
            )
            with torch.cuda.stream(stream):
                made.holds = self.model.plans.workspaces.held()
        finally:
            current.wait_stream(stream)

    def _run_before(self, made: DecodeGraph, stream: torch.cuda.Stream) -> None:
        """Run the step of a graph on the stream."""
        with torch.cuda.stream(stream), together(self.model.plans.mesh):
            self.compute(made)
        self._have_run.add(made.per_seq)

    def _capture_with_room(self, made: DecodeGraph, stream: torch.cuda.Stream) -> None:
        """Capture the step of a graph, if need be in what torch keeps for other work, which a capture cannot take."""
        try:
            made.graph = self._record(made, stream)
            return
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        torch.cuda.empty_cache()
        made.graph = self._record(made, stream)

    def _record(self, made: DecodeGraph, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        if not any(g.captured for g in self.graphs.values()):
            # A pool ends with its last graph, also with one whose capture failed: torch refuses it from then on.
            self._pool = torch.cuda.graph_pool_handle()
        try:
            before = self.taken.used
            # Other threads may use the device during the capture.
            with (
                self.taken.measured(),
                capturing_on(stream, graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                self.compute(made)
            made.nbytes = self.taken.used - before
        except UnpreparedError:
            raise
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise RuntimeError(
                f"a decode step of {made.seqs} sequences could not be captured, though its kernels are declared to be "
                f"capturable: {error}; decode_graphs=False runs steps kernel by kernel"
            ) from error
        return graph

    def _tell_of_memory(self, made: DecodeGraph, failure: str) -> None:
        """Say once that there was no memory for a graph."""
        if not self._told_of_memory:
            self._told_of_memory = True
            LOG.warning(
                "there is no memory to capture decode steps of %d sequences with contexts up to %d (%s): these, and others that do not "
                "fit, run kernel by kernel, which is slower. A smaller cache (memory, num_blocks) or max_seqs leaves more; "
                "explain_graphs() lists what is left out",
                made.seqs,
                made.bound,
                failure,
            )

    def _tell_of_bound(self, made: DecodeGraph) -> None:
        """Say which graphs are left out with one that went over the bound."""
        LOG.warning(
            "%s: decode graphs that are not captured yet are left out, and their steps run kernel by kernel, which is slower: %s. A larger "
            "graph_memory, or a smaller max_seqs or max_model_len, has all of them",
            self.taken,
            self._missing(made),
        )

    def _missing(self, made: DecodeGraph) -> str:
        """The sizes of the kind of a graph that are not captured, as text."""
        bounds, most = [self.bound(1)], self.padded(min(self._rows, self.largest // made.per_seq))
        while bounds[-1] < self._limit:
            bounds.append(self.bound(bounds[-1] + 1))
        have = {key for key, graph in self.graphs.items() if graph.captured}
        missing = {
            size: [bound for bound in bounds if (size, bound, made.per_seq) not in have]
            for size in self.sizes
            if size <= most
        }
        each = "" if made.per_seq == 1 else f" of {made.per_seq} tokens each"
        kinds = [
            f"{size}" + ("" if left == bounds else f" (contexts up to {', '.join(map(str, left))})")
            for size, left in missing.items()
            if left
        ]
        return f"{', '.join(kinds)} requests{each}"

    def record(self, made: DecodeGraph) -> None:
        """Run the step of a graph on a CPU, whose kernels have been selected by the one before, and record it, if it can be."""
        before = self._step_memory.nbytes
        try:
            step = RecordedStep(partial(self.compute, made), self._step_memory)
        except (UnpreparedError, UnrecordableError) as error:
            made.reason = f"not recorded: {error}"
            self.compute(made)
            return
        made.graph, made.holds = step, self.model.plans.workspaces.held()
        made.nbytes = self._step_memory.nbytes - before
        self.taken.add(made.nbytes)
        if reason := self.taken.settled(""):
            self._give_up(made, reason)
            self._tell_of_bound(made)

    @torch.inference_mode()
    def compute(self, made: DecodeGraph) -> None:
        """Run the step of a graph kernel by kernel."""
        with torch.cuda.device(self.device) if self._cuda else nullcontext():
            made.buffers.read_tokens()
            batch = made.buffers.batch(made.bound)
            if (mesh := self.model.plans.mesh).context_parallel:
                batch = shard_context(batch, mesh.rank, mesh.world, self.cache.block_size)
            if self._kept is None or self.hidden is None:
                hidden = self.model.forward(batch, self.cache)
            else:
                hidden, states = self._kept.forward(batch, self.cache)
                self.hidden[: len(states)].copy_(states)
            rows = hidden if made.per_seq == 1 else hidden[batch.rows]
            logits = self.model.logits(rows, made.logits[: len(rows)])
            self.sampler.draw(logits, made.buffers.sampling, made.buffers.ids)
            made.buffers.write_tokens()
