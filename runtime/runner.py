"""The runner: from a committed step to tensors, logits and sampled ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gristmill.runtime.batch import Batch, make_batch, send
from gristmill.runtime.cache import PagedCache
from gristmill.runtime.decode_graphs import DecodeGraphs
from gristmill.runtime.errors import UsageError
from gristmill.runtime.logits_processors import LogitsProcessors
from gristmill.runtime.logprobs import ROWS, token_logprobs
from gristmill.runtime.models import Model
from gristmill.runtime.sampler import Sampler, SamplingRow
from gristmill.runtime.scheduler import ScheduledRequest, TokenLogprobs


@dataclass(slots=True)
class PromptLogprobs:
    """Log-probabilities of a prompt, while its chunks are computed. ids: the prompt. top: number of likeliest tokens at each position.
    logprobs: one for each token; None for the first, which nothing predicts, and for those not computed yet."""

    ids: list[int]
    top: int
    logprobs: list[TokenLogprobs | None]


@dataclass(frozen=True, slots=True)
class StepResult:
    """ids: as in `Runner.run`. logprobs: by request id, of each of its ids, for requests with logprobs."""

    ids: list[int]
    logprobs: dict[str, list[TokenLogprobs]]


class Runner:
    """A model on a device with its paged cache.

    decode_graphs: run decode steps by `DecodeGraphs`; None = on a GPU. UsageError: blocks of the cache are not of the size that
    the model was loaded for.
    """

    def __init__(self, model: Model, cache: PagedCache, decode_graphs: bool | None = None) -> None:
        if cache.block_size != model.plans.block_size:
            raise UsageError(
                f"the model's attention is planned for cache blocks of {model.plans.block_size} tokens, the cache has blocks of "
                f"{cache.block_size}"
            )
        self.model = model
        self.cache = cache
        self.device = model.plans.device
        self.sampler = Sampler(model.plans, model.config.vocab_size)
        use_graphs = self.device.type == "cuda" if decode_graphs is None else decode_graphs
        self.decode = DecodeGraphs(model, cache, self.sampler) if use_graphs else None
        self.processors = LogitsProcessors(model.config.vocab_size, self.device)

    @torch.inference_mode()
    def run(self, entries: Sequence[ScheduledRequest], rows: Sequence[SamplingRow]) -> list[int]:
        """Compute the entries of a plan; returns one id per row: 1 + drafts rows for each entry that samples, in order.

        Logits are computed only for those, and only ids are copied from the device.
        """
        if self.processors:
            return self.run_detailed(entries, rows, {}).ids
        if self.decode is not None and (ids := self.decode.run(entries, rows)) is not None:
            return ids
        batch = make_batch(entries, self.cache.block_size, self.device)
        hidden = self.model.forward(batch, self.cache)
        if not rows:
            return []
        return self.sampler(self.model.logits(hidden[batch.rows]), rows)

    @torch.inference_mode()
    def run_detailed(
        self,
        entries: Sequence[ScheduledRequest],
        rows: Sequence[SamplingRow],
        prompts: Mapping[str, PromptLogprobs],
    ) -> StepResult:
        """`run` with the logits between model and sampler: processed, and read for log-probabilities.

        prompts: by request id, the log-probabilities of prompts, which are updated in place. A decode graph ends with the logits
        in this case, and the sampler is launched after it.
        """
        logits = None if self.decode is None else self.decode.logits(entries, rows)
        if logits is None:
            batch = make_batch(entries, self.cache.block_size, self.device)
            hidden = self.model.forward(batch, self.cache)
            if prompts:
                self._read_prompts(hidden, entries, prompts)
            if not rows:
                return StepResult([], {})
            logits = self.model.logits(hidden[batch.rows])
        sampling = [entry for entry in entries if entry.samples]
        request_ids = [entry.id for entry in sampling for _ in range(1 + entry.drafts)]
        drafted = [prefix for entry in sampling for prefix in _drafted_prefixes(entry)]
        ids = self.sampler(self.processors.apply(logits, request_ids, drafted), rows)
        with_logprobs = [
            (place, row.params.logprobs)
            for place, row in enumerate(rows)
            if row.params.logprobs is not None and ids[place] >= 0
        ]
        if not with_logprobs:
            return StepResult(ids, {})
        places = [place for place, _ in with_logprobs]
        chosen = logits[send(places, torch.int64, self.device)]
        of_tokens = token_logprobs(
            chosen, [ids[place] for place in places], [top for _, top in with_logprobs]
        )
        logprobs: dict[str, list[TokenLogprobs]] = {}
        for place, token in zip(places, of_tokens, strict=True):
            logprobs.setdefault(request_ids[place], []).append(token)
        return StepResult(ids, logprobs)

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

    @torch.inference_mode()
    def logits(self, entries: Sequence[ScheduledRequest]) -> Tensor:
        """float32 logits [tokens, vocab] of every token of the entries."""
        batch: Batch = make_batch(entries, self.cache.block_size, self.device, all_rows=True)
        return self.model.logits(self.model.forward(batch, self.cache)).float()


def _drafted_prefixes(entry: ScheduledRequest) -> list[list[int]]:
    """For each row that an entry samples, the drafts that precede it."""
    drafts = entry.tokens[entry.count - entry.drafts :] if entry.drafts else []
    return [drafts[:count] for count in range(len(drafts) + 1)]
