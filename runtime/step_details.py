"""What a step makes of its logits besides a sample of each row: processed rows, log-probabilities, and why a row has no id.

Everything is computed on the device behind the step, and copied to the host with its ids: the next step need not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gristmill.runtime.batch import fetch, send
from gristmill.runtime.errors import ErrorInfo
from gristmill.runtime.logits_processors import LogitsProcessors, ProcessedRows
from gristmill.runtime.logprobs import ROWS, PromptPart, logprob_rows, read_rows
from gristmill.runtime.sampler import Sampler, SamplingRow
from gristmill.runtime.scheduler import ScheduledRequest, TokenLogprobs


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step.

    Attributes:
        ids: as `Runner.run` returns them.
        logprobs: by request id, the log-probabilities of each of its ids, for requests with logprobs.
        errors: by request id, why its first row has no id, as far as that is known.
        prompts: by request id, the log-probabilities of the tokens of a `PromptPart`.
    """

    ids: list[int]
    logprobs: Mapping[str, list[TokenLogprobs]] = field(default_factory=dict)
    errors: Mapping[str, ErrorInfo] = field(default_factory=dict)
    prompts: Mapping[str, list[TokenLogprobs]] = field(default_factory=dict)


class StepDetails:
    """The details of one step: made when it is launched; computed on the device by `read_prompts` and `finish`; taken by `result` when the
    step has ended.

    Args:
        prompts: by request id, the tokens of prompts whose log-probabilities are read.
        processed: the rows that are processed before they are sampled.
    """

    def __init__(
        self,
        entries: Sequence[ScheduledRequest],
        rows: Sequence[SamplingRow],
        prompts: Mapping[str, PromptPart],
        processed: ProcessedRows | None,
    ) -> None:
        self._entries, self._rows = entries, rows
        self._prompts, self._processed = prompts, processed
        self._read = [place for place, row in enumerate(rows) if row.params.logprobs is not None]
        self._of_rows: list[Tensor] = []
        self._of_prompts: dict[str, list[Tensor]] = {}

    @staticmethod
    def of(
        entries: Sequence[ScheduledRequest],
        rows: Sequence[SamplingRow],
        prompts: Mapping[str, PromptPart],
        processors: LogitsProcessors,
    ) -> StepDetails | None:
        """The details of a step; None if it has none."""
        processed = processors.prepare(entries) if processors else None
        if processed is None and not prompts and all(row.params.logprobs is None for row in rows):
            return None
        return StepDetails(entries, rows, prompts, processed)

    def read_prompts(self, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]) -> None:
        """Read the log-probabilities of prompts from the hidden states of all tokens of the step."""
        begin = 0
        for entry in self._entries if self._prompts else ():
            if (part := self._prompts.get(entry.id)) is not None:
                read = self._of_prompts[entry.id] = []
                for first in range(0, len(part.targets), ROWS):
                    some = part.targets[first : first + ROWS]
                    logits = logits_of(hidden[begin + first : begin + first + len(some)])
                    targets = send(some, torch.int64, hidden.device)
                    read.append(fetch(logprob_rows(logits, targets, part.top)))
            begin += entry.count

    def finish(self, logits: Tensor, fed: Tensor, ids: Tensor, sampler: Sampler) -> None:
        """Sample the processed rows, and read log-probabilities.

        Args:
            logits: those of the model, [at least rows, vocab].
            fed: int64 [at least rows], the token whose successor each row predicts.
            ids: int64 [at least rows], a sample of each row, where the processed ones get theirs.
        """
        if self._processed is not None:
            places = self._processed.places
            processed = self._processed.process(logits, fed)
            drawn = sampler.sample(processed, [self._rows[place] for place in places])
            ids.index_copy_(0, send(places, torch.int64, ids.device), drawn)
        if self._read:
            places_read = send(self._read, torch.int64, ids.device)
            tokens = ids[places_read].clamp_(min=0)
            most = max(self._rows[place].params.logprobs or 0 for place in self._read)
            for first in range(0, len(self._read), ROWS):
                some = slice(first, first + ROWS)
                self._of_rows.append(fetch(logprob_rows(logits[places_read[some]], tokens[some], most)))

    def result(self, ids: list[int]) -> StepResult:
        """The results of the step, which has ended, with its ids."""
        errors = {} if self._processed is None else self._processed.errors(ids)
        prompts = {}
        for name, parts in self._of_prompts.items():
            targets, top = self._prompts[name].targets, self._prompts[name].top
            prompts[name] = read_rows(parts, targets, [top] * len(targets))
        if not self._read:
            return StepResult(ids, {}, errors, prompts)
        names = [e.id for e in self._entries if e.samples for _ in range(1 + e.drafts)]
        read = read_rows(
            self._of_rows,
            [ids[place] for place in self._read],
            [self._rows[place].params.logprobs or 0 for place in self._read],
        )
        logprobs: dict[str, list[TokenLogprobs]] = {}
        for place, one in zip(self._read, read, strict=True):
            if ids[place] >= 0:
                logprobs.setdefault(names[place], []).append(one)
        return StepResult(ids, logprobs, errors, prompts)
