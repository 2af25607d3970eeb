"""The runner: from a committed step to tensors, logits and sampled ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from gristmill.runtime.batch import Batch, make_batch, make_feedback, send, shard_context
from gristmill.runtime.decode_graphs import DecodeGraphs
from gristmill.runtime.errors import ErrorInfo, UsageError
from gristmill.runtime.hidden_states import HiddenStates, KeptStates
from gristmill.runtime.kv_cache.paged import PagedCache
from gristmill.runtime.logits_processors import LogitsProcessors
from gristmill.runtime.logprobs import ROWS, PromptLogprobs, token_logprobs
from gristmill.runtime.models import Model
from gristmill.runtime.sampler import Sampler, SamplingRow
from gristmill.runtime.scheduler import ScheduledRequest, TokenLogprobs
from gristmill.runtime.steps_in_flight import LaunchedStep, SampledTokens, StepRing


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step.

    Attributes:
        ids: as `Runner.run` returns them.
        logprobs: by request id, the log-probabilities of each of its ids, for requests with logprobs.
        errors: by request id, why its first row has no id, as far as that is known.
    """

    ids: list[int]
    logprobs: dict[str, list[TokenLogprobs]]
    errors: dict[str, ErrorInfo] = field(default_factory=dict)


class Runner:
    """A model on a device with its paged cache.

    A step is launched, and its ids are collected later; a second one may be launched in between. Its entries may then take
    tokens from the first, without the host.

    Args:
        decode_graphs: whether decode steps run by `DecodeGraphs`; None = on a GPU.
        max_seqs: the number of rows of requests, above any row of an entry.

    Attributes:
        hidden: the hidden states of the last step, valid until the next one is launched; None unless `keep_hidden` was called.

    Raises:
        UsageError: blocks of the cache are not of the size that the model was loaded for.
    """

    hidden: HiddenStates | None = None

    def __init__(
        self, model: Model, cache: PagedCache, decode_graphs: bool | None = None, max_seqs: int = 256
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
        self.processors = LogitsProcessors(model.config.vocab_size, self.device)
        self._sampled = SampledTokens(max_seqs, self.device)
        self._ring = StepRing(self.device)
        self._most_drafts = 0
        self._kept: KeptStates | None = None
        self.decode: DecodeGraphs | None = None
        if self.device.type == "cuda" if decode_graphs is None else decode_graphs:
            self.make_decode_graphs()

    def make_decode_graphs(self) -> None:
        """Run decode steps by graphs from now on, which are captured again."""
        self.decode = DecodeGraphs(
            self.model, self.cache, self.sampler, self._sampled, self._most_drafts, self._kept
        )

    def keep_hidden(self, layers: tuple[int, ...] = ()) -> None:
        """From now on leave the hidden states of each step in `hidden`: as `KeptStates`."""
        self._kept = KeptStates(self.model, layers)
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
        if self.processors:
            return self.run_detailed(entries, rows, {}).ids
        return self.collect(self.launch(entries, rows))

    @torch.inference_mode()
    def launch(self, entries: Sequence[ScheduledRequest], rows: Sequence[SamplingRow]) -> LaunchedStep:
        """Launch a step as in `run`, without processors; does not wait for the device.

        Raises RuntimeError if two steps are in flight already.
        """
        step = self._ring.take(len(rows))
        work = self._graph(entries, rows, step.slot, samples=True)
        self._start(step, self._kernel_by_kernel(entries, rows) if work is None else work)
        return step

    def collect(self, step: LaunchedStep) -> list[int]:
        """Wait for the oldest step in flight; its ids, one per entry that samples, -1 for a row without a result."""
        step.open = False
        return step.ids()

    def drop(self, step: LaunchedStep) -> None:
        """The step will not be collected. It runs to its end."""
        step.open = False

    def _start(self, step: LaunchedStep, work: Callable[[], Tensor | None]) -> None:
        """Launch the device's part of a step."""
        step.launch(work)

    def _kernel_by_kernel(
        self, entries: Sequence[ScheduledRequest], rows: Sequence[SamplingRow]
    ) -> Callable[[], Tensor | None]:
        batch = self._batch(entries)
        feedback = make_feedback(entries, self.device)

        def run() -> Tensor | None:
            if feedback is not None and len(feedback.places):
                batch.tokens.index_copy_(0, feedback.places, self._sampled.read(feedback.read_rows))
            hidden = self._forward(batch, entries)
            if not rows:
                return None
            ids = self.sampler.sample(self.model.logits(hidden[batch.rows]), rows)
            if feedback is not None:
                self._sampled.write(feedback.write_rows, ids)
            return ids

        return run

    def _forward(self, batch: Batch, entries: Sequence[ScheduledRequest]) -> Tensor:
        if self._kept is None:
            return self.model.forward(batch, self.cache)
        hidden, states = self._kept.forward(batch, self.cache)
        self.hidden = HiddenStates(states, [0, *accumulate(entry.count for entry in entries[:-1])])
        return hidden

    def _graph(
        self, entries: Sequence[ScheduledRequest], rows: Sequence[SamplingRow], slot: int, samples: bool
    ) -> Callable[[], Tensor] | None:
        if self.decode is None:
            return None
        work = self.decode.prepare(entries, rows, slot, samples)
        if work is not None and self.decode.hidden is not None:
            self.hidden = HiddenStates(self.decode.hidden, self.decode.first_rows(entries))
        return work

    @torch.inference_mode()
    def run_detailed(
        self,
        entries: Sequence[ScheduledRequest],
        rows: Sequence[SamplingRow],
        prompts: Mapping[str, PromptLogprobs],
    ) -> StepResult:
        """`run` with the logits between model and sampler: processed, and read for log-probabilities.

        A decode graph then ends with the logits, and the sampler is launched after it. `prompts` has the log-probabilities of prompts by request
        id, which are updated in place.
        """
        logits = self._graph_logits(entries, rows)
        if logits is None:
            batch = self._batch(entries)
            hidden = self._forward(batch, entries)
            if prompts:
                self._read_prompts(hidden, entries, prompts)
            if not rows:
                return StepResult([], {})
            logits = self.model.logits(hidden[batch.rows])
        sampling = [entry for entry in entries if entry.samples]
        request_ids = [entry.id for entry in sampling for _ in range(1 + entry.drafts)]
        drafted = [prefix for entry in sampling for prefix in _drafted_prefixes(entry)]
        processed = self.processors.apply(logits, request_ids, drafted)
        ids = self.sampler(processed, rows)
        errors = self._errors(sampling, ids, logits, processed)
        with_logprobs = [
            (place, row.params.logprobs)
            for place, row in enumerate(rows)
            if row.params.logprobs is not None and ids[place] >= 0
        ]
        if not with_logprobs:
            return StepResult(ids, {}, errors)
        places = [place for place, _ in with_logprobs]
        chosen = logits[send(places, torch.int64, self.device)]
        of_tokens = token_logprobs(
            chosen, [ids[place] for place in places], [top for _, top in with_logprobs]
        )
        logprobs: dict[str, list[TokenLogprobs]] = {}
        for place, token in zip(places, of_tokens, strict=True):
            logprobs.setdefault(request_ids[place], []).append(token)
        return StepResult(ids, logprobs, errors)

    def _errors(
        self, sampling: Sequence[ScheduledRequest], ids: Sequence[int], logits: Tensor, processed: Tensor
    ) -> dict[str, ErrorInfo]:
        """Why requests end here: those whose first row has no id. Rows after a draft may have none either, which does not matter."""
        errors, place = {}, 0
        for entry in sampling:
            if ids[place] < 0:
                errors[entry.id] = self.processors.why_no_token(entry.id, logits[place], processed[place])
            place += 1 + entry.drafts
        return errors

    def _graph_logits(
        self, entries: Sequence[ScheduledRequest], rows: Sequence[SamplingRow]
    ) -> Tensor | None:
        """The logits [entries, vocab] of a decode step, by a graph; None if none fits."""
        if self.decode is None:
            return None
        step = self._ring.take(0)
        work = self._graph(entries, rows, step.slot, samples=False)
        if work is None:
            return None
        logits = None

        def run() -> None:
            nonlocal logits
            logits = work()

        step.launch(run)
        step.open = False
        return logits

    def _read_prompts(
        self, hidden: Tensor, entries: Sequence[ScheduledRequest], prompts: Mapping[str, PromptLogprobs]
    ) -> None:
        """Write the log-probabilities of the prompt tokens that the positions of this step predict."""
        begin = 0
        for entry in entries:
            if (prompt := prompts.get(entry.id)) is not None:
                targets = prompt.ids[entry.start + 1 : entry.context + 1]
                for first in range(0, len(targets), ROWS):
                    some = targets[first : first + ROWS]
                    start = begin + first
                    logits = self.model.logits(hidden[start : start + len(some)])
                    place = entry.start + 1 + first
                    prompt.logprobs[place : place + len(some)] = token_logprobs(
                        logits, some, [prompt.top] * len(some)
                    )
            begin += entry.count

    def _batch(self, entries: Sequence[ScheduledRequest], all_rows: bool = False) -> Batch:
        mesh, size = self.model.plans.mesh, self.cache.block_size
        if mesh.context_parallel:
            batch = make_batch(entries, size * mesh.world, self.device, all_rows)
            return shard_context(batch, mesh.rank, mesh.world, size)
        return make_batch(entries, size, self.device, all_rows, groups=len(self.cache.windows))

    @torch.inference_mode()
    def logits(self, entries: Sequence[ScheduledRequest]) -> Tensor:
        """float32 logits [tokens, vocab] of every token of the entries."""
        batch = self._batch(entries, all_rows=True)
        return self.model.logits(self.model.forward(batch, self.cache)).float()


def _drafted_prefixes(entry: ScheduledRequest) -> list[list[int]]:
    """For each row that an entry samples, the drafts that precede it."""
    drafts = entry.draft_tokens
    return [drafts[:count] for count in range(len(drafts) + 1)]
