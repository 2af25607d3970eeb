"""The requests of a worker: from steps of vLLM's scheduler to entries for the runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gristmill.integrations.vllm.cache import BlockTables
from gristmill.integrations.vllm.sampling import seed_of, translate
from gristmill.runtime.errors import UsageError
from gristmill.runtime.logits_processors import LogitsProcessors
from gristmill.runtime.logprobs import PromptLogprobs
from gristmill.runtime.sampler import SamplingRow
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import ScheduledRequest


@dataclass(slots=True)
class ActiveRequest:
    """A request that vLLM has sent to the worker.

    Attributes:
        tokens: the prompt and every sampled token; vLLM's scheduler may be one step behind.
        block_ids: its blocks of the cache, of all groups, as `BlockTables.interleaved`.
        stop_ids: tokens that are barred until min_tokens.
        prompt: log-probabilities of the prompt until all are computed, None if none are wanted.
    """

    tokens: list[int]
    prompt_len: int
    block_ids: list[int]
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    prompt: PromptLogprobs | None = None

    @property
    def row(self) -> SamplingRow:
        """How its next token is sampled."""
        return SamplingRow(self.params, self.seed, len(self.tokens) - self.prompt_len)


class Requests:
    """The requests that vLLM has scheduled and not finished.

    Args:
        seed: source of the seeds of requests without one.
        processors: the runner's, told of requests that edit logits.
        tables: the groups of the cache.
    """

    def __init__(self, seed: int, processors: LogitsProcessors, tables: BlockTables) -> None:
        self.seed = seed
        self.processors = processors
        self.tables = tables
        self.active: dict[str, ActiveRequest] = {}

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
        return [self._entry(name, starts[name], count) for name, count in output.num_scheduled_tokens.items()]

    def rows(self, entries: Sequence[ScheduledRequest]) -> list[SamplingRow]:
        """How the entries that sample are sampled."""
        return [self.active[entry.id].row for entry in entries if entry.samples]

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

    def append(self, entries: Sequence[ScheduledRequest], sampled: Sequence[int]) -> None:
        """The sampled ids of the entries that sample."""
        names = [entry.id for entry in entries if entry.samples]
        for name, token in zip(names, sampled, strict=True):
            self.active[name].tokens.append(token)

    def _add(self, new: Any) -> None:
        if new.prompt_token_ids is None or new.sampling_params is None or new.lora_request is not None:
            raise UsageError(
                f"request {new.req_id}: the gristmill worker serves prompts of token ids, without LoRA"
            )
        # Model Runner V2's scheduler sends a preempted request again as a new one, with the tokens that it has sampled.
        tokens = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
        params = translate(new.sampling_params)
        self.active[new.req_id] = ActiveRequest(
            tokens=list(tokens),
            prompt_len=len(new.prompt_token_ids),
            block_ids=self.tables.interleaved(new.block_ids),
            params=params,
            seed=seed_of(params, self.seed, new.req_id),
            stop_ids=tuple(sorted(new.sampling_params.all_stop_token_ids)),
        )
        if params.prompt_logprobs is not None:
            ids = list(new.prompt_token_ids)
            prompt = PromptLogprobs(ids, params.prompt_logprobs, [None] * len(ids))
            self.active[new.req_id].prompt = prompt
        self._process(new.req_id)

    def _process(self, name: str) -> None:
        request = self.active[name]
        self.processors.remove(name)
        if request.params.edits_logits:
            self.processors.add(name, request.params, request.tokens, request.prompt_len, request.stop_ids)

    def _resume(self, cached: Any, index: int, name: str) -> None:
        request, blocks = self.active[name], cached.new_block_ids[index]
        if name in cached.resumed_req_ids:
            request.block_ids = self.tables.interleaved(blocks)
        elif blocks is not None:
            request.block_ids += self.tables.interleaved(blocks)
        known = request.prompt_len + cached.num_output_tokens[index]
        if known < len(
            request.tokens
        ):  # a scheduler that runs ahead takes back the tokens of a step that it discards
            del request.tokens[known:]
            self._process(name)

    def _entry(self, name: str, start: int, count: int) -> ScheduledRequest:
        request = self.active[name]
        end = start + count
        if end > len(request.tokens):
            raise RuntimeError(
                f"request {name}: vLLM scheduled tokens {start} to {end}, and it has {len(request.tokens)}"
            )
        return ScheduledRequest(
            id=name,
            start=start,
            count=count,
            samples=end == len(request.tokens),
            tokens=request.tokens[start:end],
            block_ids=request.block_ids,
            new_blocks=[],
        )

    @staticmethod
    def _require_served(output: Any) -> None:
        for name in ("scheduled_spec_decode_tokens", "scheduled_encoder_inputs", "kv_cache_block_copies"):
            if getattr(output, name, None):
                raise UsageError(f"the gristmill worker does not serve vLLM's {name}")
