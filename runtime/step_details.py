"""What a step makes of its logits besides a sample of each row: processed rows, log-probabilities, and why a row has no id.

Everything is computed on the device behind the step, and copied to the host with its ids: the next step need not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gristmill.runtime.batch import send
from gristmill.runtime.errors import ErrorInfo
from gristmill.runtime.logits_processors import GrammarRows, LogitsProcessors, ProcessedRows
from gristmill.runtime.logprobs import ROWS, LogprobReader, PromptPart, ReadRows, read_rows
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
    """The details of one step: made when it is launched; computed on the device by `read_prompts`, `finish` and, if it `waits`, `complete`;
    taken by `result` when the step has ended.

    Args:
        prompts: by request id, the tokens of prompts whose log-probabilities are read.
        processed: the rows that are processed before they are sampled.
        later: those that wait for the results of the step before.
        reader: reads log-probabilities.

    Attributes:
        write_tokens: gives the ids of all rows to the step after this one, on the device; called behind `complete`.
    """

    def __init__(
        self,
        entries: Sequence[ScheduledRequest],
        rows: Sequence[SamplingRow],
        prompts: Mapping[str, PromptPart],
        processed: ProcessedRows | None,
        later: GrammarRows | None,
        reader: LogprobReader,
    ) -> None:
        self._entries, self._rows = entries, rows
        self._reader = reader
        self._prompts = prompts
        self._processed = [] if processed is None else [processed]
        self._later, self._has_rest = later, later is not None
        self._read = [place for place, row in enumerate(rows) if row.params.logprobs is not None]
        self._of_rows: list[ReadRows] = []
        self._of_prompts: dict[str, list[ReadRows]] = {}
        self._first_part: tuple[Tensor, Tensor, Tensor] | None = None
        self.write_tokens: Callable[[Tensor], None] = lambda ids: None

    @staticmethod
    def of(
        entries: Sequence[ScheduledRequest],
        rows: Sequence[SamplingRow],
        prompts: Mapping[str, PromptPart],
        processors: LogitsProcessors,
        reader: LogprobReader,
    ) -> StepDetails | None:
        """The details of a step; None if it has none."""
        processed, later = processors.prepare(entries) if processors else (None, None)
        plain = processed is None and later is None and not prompts
        if plain and all(row.params.logprobs is None for row in rows):
            return None
        return StepDetails(entries, rows, prompts, processed, later, reader)

    @property
    def waits(self) -> bool:
        """Whether rows wait for the results of the step before: `prepare_rest` comes then, and `complete` behind it."""
        return self._later is not None

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
                    places = torch.arange(len(some), device=hidden.device)
                    read.append(self._reader.read(logits, places, targets, part.top))
            begin += entry.count

    def finish(self, logits: Tensor, fed: Tensor, ids: Tensor, sampler: Sampler) -> None:
        """Sample the processed rows that do not wait, and read log-probabilities if none does.

        Args:
            logits: those of the model, [at least rows, vocab].
            fed: int64 [at least rows], the token whose successor each row predicts.
            ids: int64 [at least rows], a sample of each row, where the processed ones get theirs.
        """
        for processed in self._processed:
            self._sample(processed, logits, fed, ids, sampler)
        if self._has_rest:
            self._first_part = logits, fed, ids
        else:
            self._read_logprobs(logits, ids)

    def prepare_rest(self) -> ProcessedRows | None:
        """The rows that waited, now that the results of the step before are known; None if their requests have ended."""
        later, self._later = self._later, None
        return None if later is None else later.ready()

    def complete(self, rest: ProcessedRows | None, sampler: Sampler) -> Tensor:
        """Sample the rows that waited, behind `finish`, whose tensors must still be valid. The ids of all rows."""
        if self._first_part is None:
            raise RuntimeError("the first part of the step was not computed")
        logits, fed, ids = self._first_part
        self._first_part = None
        if rest is not None:
            self._processed.append(rest)
            self._sample(rest, logits, fed, ids, sampler)
        self._read_logprobs(logits, ids)
        return ids

    def _sample(
        self, processed: ProcessedRows, logits: Tensor, fed: Tensor, ids: Tensor, sampler: Sampler
    ) -> None:
        arrays = sampler.arrays([self._rows[place] for place in processed.places])
        values, places, sent = processed.process(logits, fed, arrays)
        ids.index_copy_(0, places, sampler.sample_sent(values, sent))

    def _read_logprobs(self, logits: Tensor, ids: Tensor) -> None:
        if not self._read:
            return
        places = send(self._read, torch.int64, ids.device)
        most = max(self._rows[place].params.logprobs or 0 for place in self._read)
        self._of_rows.append(self._reader.read(logits, places, ids, most))

    def result(self, ids: list[int]) -> StepResult:
        """The results of the step, which has ended, with its ids."""
        errors = {name: error for rows in self._processed for name, error in rows.errors(ids).items()}
        prompts = {}
        for name, parts in self._of_prompts.items():
            targets, top = self._prompts[name].targets, self._prompts[name].top
            prompts[name] = read_rows(parts, targets, [top] * len(targets))
        if not self._read:
            return StepResult(ids, {}, errors, prompts)
        read = read_rows(
            self._of_rows,
            [ids[place] for place in self._read],
            [self._rows[place].params.logprobs or 0 for place in self._read],
        )
        logprobs: dict[str, list[TokenLogprobs]] = {}
        names = [e.id for e in self._entries if e.samples for _ in range(1 + e.drafts)]
        for place, one in zip(self._read, read, strict=True):
            if ids[place] >= 0:
                logprobs.setdefault(names[place], []).append(one)
        return StepResult(ids, logprobs, errors, prompts)
