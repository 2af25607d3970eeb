"""The runner: from a committed step to tensors, logits and sampled ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gristmill.kernels.native import manifest
from gristmill.runtime.batch import Batch, make_batch, make_feedback, shard_context
from gristmill.runtime.decode_graphs import DecodeGraphs
from gristmill.runtime.errors import UsageError
from gristmill.runtime.graph_memory import GraphMemory
from gristmill.runtime.hidden_states import HiddenStates, KeptStates
from gristmill.runtime.kv_cache.paged import PagedCache
from gristmill.runtime.logits_processors import LogitsProcessors
from gristmill.runtime.logprobs import LogprobReader, PromptPart
from gristmill.runtime.models import Model
from gristmill.runtime.parallel.mesh import greatest
from gristmill.runtime.prompt_graphs import PromptGraphs, most_tokens
from gristmill.runtime.sampler import Sampler, SamplingRow
from gristmill.runtime.scheduler import ScheduledRequest
from gristmill.runtime.step_details import StepDetails, StepResult
from gristmill.runtime.steps_in_flight import LaunchedStep, SampledTokens, StepRing

NO_PROMPTS: Mapping[str, PromptPart] = {}


class Runner:
    """A model on a device with its paged cache.

    A step is launched, and its ids are collected later; a second one may be launched in between. Its entries may then take
    tokens from the first, without the host.

    Args:
        decode_graphs: whether decode steps run by `DecodeGraphs`; None = on a GPU, and on a CPU those of the sizes in `CPU_SIZES`, if it has
            the model to itself.
        max_seqs: the number of rows of requests, above any row of an entry.
        prompt_graphs: tokens of the largest other step that runs by `PromptGraphs`; 0 = none. None = `most_tokens` of the model on a GPU with
            decode graphs.
        graph_memory: the bound of the memory that graphs take, as in `EngineConfig`.

    Attributes:
        hidden: the hidden states of the step that was collected last; None unless `keep_hidden` was called.
        left_out: layers that steps do not run, during rehearsals.

    Raises:
        UsageError: blocks of the cache are not of the size that the model was loaded for.
    """

    hidden: HiddenStates | None = None
    left_out: frozenset[int] = frozenset()

    def __init__(
        self,
        model: Model,
        cache: PagedCache,
        decode_graphs: bool | None = None,
        max_seqs: int = 256,
        prompt_graphs: int | None = None,
        graph_memory: int | float | None = None,
    ) -> None:
        if cache.block_size != model.plans.block_size:
            raise UsageError(
                f"the model's attention is planned for cache blocks of {model.plans.block_size} tokens, the cache has blocks of "
                f"{cache.block_size}"
            )
        self.model = model
        self.cache = cache
        self.device = model.plans.device
        self.sampler = Sampler(model.plans, model.config.vocab_size)
        self.max_seqs = max_seqs
        self.processors = LogitsProcessors(model.config.vocab_size, model.plans)
        self.logprob_reader = LogprobReader(model.plans, model.config.vocab_size)
        self._sampled = SampledTokens(max_seqs, self.device)
        self._ring = StepRing(self.device)
        self._most_drafts = 0
        self._kept: KeptStates | None = None
        self._left: HiddenStates | None = None  # by the part of a step that ran last
        agree = partial(greatest, mesh=model.plans.mesh)
        self._graph_memory = GraphMemory(graph_memory, self.device, agree)
        self.decode: DecodeGraphs | None = None
        self.prompts: PromptGraphs | None = None
        on_gpu = self.device.type == "cuda"
        self._pads = on_gpu or decode_graphs is not None
        graphs = decode_graphs
        if graphs is None:
            graphs = on_gpu or (model.plans.mesh.world == 1 and bool(manifest().get("cpu_levels")))
        if prompt_graphs is None:
            prompt_graphs = most_tokens(model.config) if graphs and on_gpu else 0
        self._most_prompt_tokens = prompt_graphs if getattr(model, "in_pieces", False) else 0
        if graphs:
            self.make_decode_graphs()
        self.make_prompt_graphs()

    def make_prompt_graphs(self) -> None:
        """Run other steps by graphs from now on, as far as that was asked for; they are captured again."""
        if self._most_prompt_tokens and self.prompts is None:
            self.prompts = PromptGraphs(self.model, self.cache, self._most_prompt_tokens, self._graph_memory)

    def make_decode_graphs(self) -> None:
        """Run decode steps by graphs from now on, which are captured again."""
        self.decode = DecodeGraphs(
            self.model,
            self.cache,
            self.sampler,
            self._sampled,
            self._most_drafts,
            self._kept,
            self._graph_memory,
            self._pads,
        )

    def drop_graphs(self) -> None:
        """Give graphs back, until they are made again."""
        self.decode = self.prompts = None
        self._graph_memory.give_back()

    def explain_graphs(self) -> list[dict[str, Any]]:
        """The rows of `DecodeGraphs.explain` and of `PromptGraphs.explain`."""
        return [
            row for graphs in (self.decode, self.prompts) if graphs is not None for row in graphs.explain()
        ]

    @property
    def graph_bytes(self) -> int:
        """Memory that captured graphs take."""
        return self._graph_memory.used

    def keep_hidden(self, layers: tuple[int, ...] = ()) -> None:
        """From now on leave the hidden states of each step in `hidden`: as `KeptStates`."""
        self._kept = KeptStates(self.model, layers)
        self.prompts, self._most_prompt_tokens = None, 0
        if self.decode is not None:
            self.make_decode_graphs()

    def expect_drafts(self, most: int) -> None:
        """Steps will verify up to this many drafts per request: their graphs are padded to it."""
        self._most_drafts = most
        if self.decode is not None:
            self.decode.most_drafts = most

    def run(self, entries: Sequence[ScheduledRequest], rows: Sequence[SamplingRow]) -> list[int]:
        """Compute the entries of a step; returns one id per row: 1 + drafts rows for each entry that samples, in order.

        Logits are computed only for those, and only ids are copied from the device.
        """
        return self.collect(self.launch(entries, rows)).ids

    @torch.inference_mode()
    def launch(
        self,
        entries: Sequence[ScheduledRequest],
        rows: Sequence[SamplingRow],
        prompts: Mapping[str, PromptPart] = NO_PROMPTS,
    ) -> LaunchedStep:
        """Launch a step as in `run`, but for what waits for the results of the step before (`complete`); does not wait for the device.

        Args:
            prompts: by request id, the tokens of prompts whose log-probabilities are read, as `prompt_parts` returns them.

        Raises RuntimeError if two steps are in flight already.
        """
        step = self._ring.take(len(rows))
        step.details = details = StepDetails.of(entries, rows, prompts, self.processors, self.logprob_reader)
        work: Callable[[], Tensor | None] | None = self._graph(entries, rows, step.slot, details)
        if work is None:
            work = self._kernel_by_kernel(entries, rows, details)
        self._start(step, work if self._kept is None else self._with_hidden(step, work))
        return step

    @torch.inference_mode()
    def complete(self, step: LaunchedStep) -> None:
        """Launch the rest of a step, now that the requests have the tokens of all steps before it: rows with grammars, which must know them. No
        step may be launched in between. Nothing happens if nothing waits."""
        details = step.details
        if details is None or not details.waits:
            return
        rest = details.prepare_rest()

        def run() -> Tensor:
            ids = details.complete(rest, self.sampler)
            details.write_tokens(ids)
            return ids

        self._start(step, run)

    def collect(self, step: LaunchedStep) -> StepResult:
        """Complete the oldest step in flight, and wait for it; its results. ids: one per row, -1 for a row without a result."""
        self.complete(step)
        step.open = False
        ids = step.ids()
        self.hidden = step.hidden
        return StepResult(ids) if step.details is None else step.details.result(ids)

    def drop(self, step: LaunchedStep) -> None:
        """The step will not be collected. It runs to its end."""
        step.open = False

    def _start(self, step: LaunchedStep, work: Callable[[], Tensor | None]) -> None:
        """Launch the device's part of a step."""
        step.launch(work)

    def _kernel_by_kernel(
        self,
        entries: Sequence[ScheduledRequest],
        rows: Sequence[SamplingRow],
        details: StepDetails | None,
    ) -> Callable[[], Tensor | None]:
        batch = self._batch(entries)
        feedback = make_feedback(entries, self.device)

        def write_tokens(ids: Tensor) -> None:
            if feedback is not None:
                self._sampled.write(feedback.write_rows, ids)

        if details is not None:
            details.write_tokens = write_tokens

        def run() -> Tensor | None:
            if feedback is not None and len(feedback.places):
                batch.tokens.index_copy_(0, feedback.places, self._sampled.read(feedback.read_rows))
            hidden = self._forward(batch, entries)
            if details is not None:
                details.read_prompts(hidden, self.model.logits)
            if not rows:
                return None
            logits = self.model.logits(hidden[batch.rows])
            ids = self.sampler.sample(logits, rows)
            if details is not None:
                details.finish(logits, batch.tokens[batch.rows], ids, self.sampler)
            write_tokens(ids)
            return ids

        return run

    def _graph(
        self,
        entries: Sequence[ScheduledRequest],
        rows: Sequence[SamplingRow],
        slot: int,
        details: StepDetails | None,
    ) -> Callable[[], Tensor] | None:
        """The device's part of a decode step, by a graph; None if none fits. Rows that are processed are sampled again behind it."""
        if self.decode is None:
            return None
        prepared = self.decode.prepare(entries, rows, slot)
        if prepared is None:
            return None
        launch = prepared.run
        if (hidden := self.decode.hidden) is not None:
            firsts, tokens = self.decode.first_rows(entries), len(entries) * prepared.buffers.per_seq

            def launch() -> Tensor:
                ids = prepared.run()
                self._left = HiddenStates(hidden[:tokens].clone(), firsts)  # the next step writes over them
                return ids

        if details is None:
            return launch

        def run() -> Tensor:
            count, ids = len(rows), launch()
            details.finish(prepared.logits[:count], prepared.fed(count), ids[:count], self.sampler)
            prepared.buffers.write_tokens()
            return ids

        details.write_tokens = lambda ids: prepared.buffers.write_tokens()  # which these are
        return run

    def _forward(self, batch: Batch, entries: Sequence[ScheduledRequest]) -> Tensor:
        if self._kept is None:
            hidden = None if self.prompts is None else self.prompts.forward(batch)
            return self.model.forward(batch, self.cache) if hidden is None else hidden
        hidden, states = self._kept.forward(batch, self.cache)
        self._left = HiddenStates(states, [0, *accumulate(entry.count for entry in entries[:-1])])
        return hidden

    def _with_hidden(
        self, step: LaunchedStep, work: Callable[[], Tensor | None]
    ) -> Callable[[], Tensor | None]:
        """The device's part of a step, which leaves its hidden states in `step`."""

        def run() -> Tensor | None:
            ids = work()
            step.hidden = self._left
            return ids

        return run

    def _batch(self, entries: Sequence[ScheduledRequest], all_rows: bool = False) -> Batch:
        mesh, size = self.model.plans.mesh, self.cache.block_size
        whole = size * mesh.context_ranks
        batch = make_batch(entries, whole, self.device, all_rows, groups=len(self.cache.windows))
        if self.left_out:
            batch = replace(batch, left_out=self.left_out)
        return shard_context(batch, mesh.rank, mesh.world, size) if mesh.context_parallel else batch

    @torch.inference_mode()
    def logits(self, entries: Sequence[ScheduledRequest]) -> Tensor:
        """float32 logits [tokens, vocab] of every token of the entries."""
        batch = self._batch(entries, all_rows=True)
        return self.model.logits(self.model.forward(batch, self.cache)).float()
