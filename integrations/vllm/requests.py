"""The requests of a worker: from steps of vLLM's scheduler to entries for the runner."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gristmill.integrations.vllm.cache import BlockTables
from gristmill.integrations.vllm.sampling import seed_of, translate
from gristmill.runtime.errors import UsageError
from gristmill.runtime.grammars import HostGrammar
from gristmill.runtime.logits_processors import LogitsProcessors
from gristmill.runtime.logprobs import PromptLogprobs
from gristmill.runtime.sampler import SamplingRow
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import ScheduledRequest


@dataclass(slots=True)
class ActiveRequest:
    """A request that vLLM has sent to the worker.

    Attributes:
        tokens: the prompt and every sampled token that is known here; vLLM's scheduler may be one step behind.
        block_ids: its blocks of the cache, of all groups, as `BlockTables.interleaved`.
        stop_ids: tokens that are barred until min_tokens.
        grammar: what vLLM's grammar of a structured output allows next.
        prompt: log-probabilities of the prompt until all are computed, None if none are wanted.
        pending: tokens after the known ones that a step in flight samples.
        taken_back: how often vLLM has taken tokens back: what was sampled before does not count.
    """

    id: str
    tokens: list[int]
    prompt_len: int
    block_ids: list[int]
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    grammar: HostGrammar | None
    prompt: PromptLogprobs | None = None
    pending: int = 0
    taken_back: int = 0

    @property
    def row(self) -> SamplingRow:
        """How its next token is sampled."""
        return SamplingRow(self.params, self.seed, len(self.tokens) + self.pending - self.prompt_len)


@dataclass(frozen=True, slots=True)
class Sampling:
    """A request that samples in a step, as of its launch."""

    request: ActiveRequest
    taken_back: int


class Requests:
    """The requests that vLLM has scheduled and not finished.

    Args:
        seed: source of the seeds of requests without one.
        processors: the runner's, told of requests that edit logits.
        tables: the groups of the cache.
        max_seqs: requests per step.
    """

    def __init__(self, seed: int, processors: LogitsProcessors, tables: BlockTables, max_seqs: int) -> None:
        self.seed = seed
        self.processors = processors
        self.tables = tables
        self.active: dict[str, ActiveRequest] = {}
        self._rows: dict[str, int] = {}
        self._free_rows = list(range(max_seqs))

    def step(self, output: Any) -> list[ScheduledRequest]:
        """The entries of a `vllm.v1.core.sched.output.SchedulerOutput`, in its order.

        UsageError: the step needs something that the worker does not serve.
        """
        self._require_served(output)
        for name in output.finished_req_ids:
            self.active.pop(name, None)
            self.processors.remove(name)
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            self._add(new)
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            self._resume(cached, index, name)
            starts[name] = cached.num_computed_tokens[index]
        self._give_rows(output.num_scheduled_tokens)
        drafts = output.scheduled_spec_decode_tokens
        return [
            self._entry(name, starts[name], count, drafts.get(name, ()))
            for name, count in output.num_scheduled_tokens.items()
        ]

    def rows(self, entries: Sequence[ScheduledRequest]) -> list[tuple[ScheduledRequest, SamplingRow]]:
        """The entries that sample, and how the first token of each is sampled."""
        return [(entry, self.active[entry.id].row) for entry in entries if entry.samples]

    def sampling(self, entries: Sequence[ScheduledRequest]) -> list[Sampling]:
        """The requests of a step that sample, whose tokens are pending from now on."""
        found = []
        for entry in entries:
            if entry.samples:
                request = self.active[entry.id]
                request.pending += 1
                found.append(Sampling(request, request.taken_back))
        return found

    def allow(self, entries: Sequence[ScheduledRequest], grammar_output: Any) -> set[str]:
        """Take what the grammars of a step allow from a `vllm.v1.core.sched.output.GrammarOutput`, or None; returns the requests that have one."""
        masks: dict[str, Tensor] = {}
        if grammar_output is not None:
            rows = torch.from_numpy(grammar_output.grammar_bitmask)
            counts, names = (
                {entry.id: 1 + entry.drafts for entry in entries},
                grammar_output.structured_output_request_ids,
            )
            padded = len(rows) != sum(counts[name] for name in names)
            first = 0
            for name in names:
                masks[name] = rows[first : first + counts[name]]
                # Since vLLM 0.33 each request has as many rows as it may have drafts, and one more.
                first += len(rows) // len(names) if padded else counts[name]
        limited = set()
        for entry in entries:
            grammar = self.active[entry.id].grammar
            if grammar is not None and entry.samples:
                grammar.mask = masks.get(entry.id)
                limited.add(entry.id)
        return limited

    def sampled(self, sampling: Sequence[Sampling], runs: Sequence[Sequence[int]]) -> None:
        """The new ids of the requests that `sampling` returned."""
        for one, run in zip(sampling, runs, strict=True):
            if one.taken_back == one.request.taken_back:
                one.request.pending -= 1
                one.request.tokens += run

    def prompts(self, entries: Sequence[ScheduledRequest]) -> dict[str, PromptLogprobs]:
        """The entries of requests that want log-probabilities of their prompts."""
        wanted = ((entry.id, self.active[entry.id].prompt) for entry in entries)
        return {name: prompt for name, prompt in wanted if prompt is not None}

    def complete_prompts(self, entries: Sequence[ScheduledRequest]) -> dict[str, PromptLogprobs]:
        """The prompts whose last part this step has computed; each is returned once."""
        complete: dict[str, PromptLogprobs] = {}
        for entry in entries:
            request = self.active[entry.id]
            if request.prompt is not None and entry.context >= request.prompt_len:
                complete[entry.id], request.prompt = request.prompt, None
        return complete

    def _add(self, new: Any) -> None:
        if new.prompt_token_ids is None or new.sampling_params is None or new.lora_request is not None:
            raise UsageError(
                f"request {new.req_id}: the gristmill worker serves prompts of token ids, without LoRA"
            )
        # Model Runner V2's scheduler sends a preempted request again as a new one, with the tokens that it has sampled.
        tokens = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
        params = translate(new.sampling_params)
        self.active[new.req_id] = ActiveRequest(
            id=new.req_id,
            tokens=list(tokens),
            prompt_len=len(new.prompt_token_ids),
            block_ids=self.tables.interleaved(new.block_ids),
            params=params,
            seed=seed_of(params, self.seed, new.req_id),
            stop_ids=tuple(sorted(new.sampling_params.all_stop_token_ids)),
            grammar=None if new.sampling_params.structured_outputs is None else HostGrammar(),
        )
        if params.prompt_logprobs is not None:
            ids = list(new.prompt_token_ids)
            prompt = PromptLogprobs(ids, params.prompt_logprobs, [None] * len(ids))
            self.active[new.req_id].prompt = prompt
        self._process(new.req_id)

    def _process(self, name: str) -> None:
        request = self.active[name]
        self.processors.remove(name)
        if request.params.edits_logits or request.grammar is not None:
            self.processors.add(
                name,
                request.params,
                request.tokens,
                request.prompt_len,
                request.stop_ids,
                request.grammar,
            )

    def _resume(self, cached: Any, index: int, name: str) -> None:
        request, blocks = self.active[name], cached.new_block_ids[index]
        if name in cached.resumed_req_ids:
            request.block_ids = self.tables.interleaved(blocks)
        elif blocks is not None:
            request.block_ids += self.tables.interleaved(blocks)
        known = request.prompt_len + cached.num_output_tokens[index]
        if known < len(request.tokens) + request.pending:
            # A scheduler that runs ahead takes back the tokens of a step that it discards.
            request.taken_back += 1
            request.pending = 0
            if known < len(request.tokens):
                del request.tokens[known:]
                self._process(name)

    def _give_rows(self, scheduled: Collection[str]) -> None:
        """A row of the device's memory of sampled tokens for each request of a step. A request that waits gives its row away: by the time that it
        goes on, its tokens are known here."""
        for name in self._rows.keys() - scheduled:
            self._free_rows.append(self._rows.pop(name))
        for name in scheduled:
            if name not in self._rows:
                self._rows[name] = self._free_rows.pop()

    def _entry(self, name: str, start: int, count: int, drafts: Sequence[int]) -> ScheduledRequest:
        request = self.active[name]
        known, end = len(request.tokens), start + count - len(drafts)
        is_pending = end == known + 1 == start + 1 and request.pending == 1 and not drafts
        if end > known and not is_pending:
            raise RuntimeError(
                f"request {name}: vLLM scheduled tokens {start} to {end}, and it has {known}, {request.pending} more in flight"
            )
        return ScheduledRequest(
            id=name,
            start=start,
            count=count,
            samples=end == known + request.pending,
            tokens=None if is_pending else [*request.tokens[start:end], *drafts],
            block_ids=request.block_ids,
            new_blocks=[],
            drafts=len(drafts),
            row=self._rows[name],
        )

    @staticmethod
    def _require_served(output: Any) -> None:
        for name in ("scheduled_encoder_inputs", "kv_cache_block_copies"):
            if getattr(output, name, None):
                raise UsageError(f"the gristmill worker does not serve vLLM's {name}")
