"""The messages between the driver and its ranks. A step is what changed since the last one, in plain tuples: a few hundred bytes.

The driver has a `Sender`, each rank a `Mirror`. Block tables, sampling parameters and the tokens of processed requests are sent when
they are new, and later only what was added to them. Grammars stay with the driver: when the tokens before a step are known, it sends which
tokens may come next, one bit for each of the vocabulary.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gristmill.kernel_registry.policy import Policy
from gristmill.runtime.bad_words import BadWords
from gristmill.runtime.errors import ErrorInfo
from gristmill.runtime.grammars import Grammar, HostGrammar, next_tokens
from gristmill.runtime.logits_processors import LogitsProcessors
from gristmill.runtime.processed_requests import NO_TOKEN_ALLOWED, ProcessedRequest
from gristmill.runtime.sampler import SamplingRow
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import ScheduledRequest

REPORT = 0
"""The number of an answer that comes before the answer, and says how far the rank is: (phase, done, total)."""
GROUP = "tensor_parallel"
"""The name of the process group of all ranks."""
PROGRESS = struct.Struct("qq")
"""What a rank writes into the file of the progress of all: the number of its last message, and of collective calls it has entered."""


@dataclass(frozen=True)
class Job:
    """What a rank is started with.

    Attributes:
        device: ``cpu`` or ``cuda``, of which rank r has number r.
        folder: the folder of the rendezvous and of the progress of all ranks.
        timeout: seconds that a collective call may wait, no less than the driver waits for an answer: it is the driver that names the rank
            that is late.
        loading: arguments of `load_model`.
        choices: descriptors of the pipes to the other ranks (rank 0), or to rank 0.
        context_parallel: as in `Mesh`.
    """

    rank: int
    world: int
    device: str
    folder: str
    timeout: float
    policy: Policy
    loading: Mapping[str, Any]
    choices: tuple[int, ...]
    context_parallel: bool = False


@dataclass(frozen=True)
class Loaded:
    """What a rank knows after loading: the cache blocks that fit on its device, and its `choices`, as in `digests`."""

    num_blocks: int
    max_seqs: int
    max_batch_tokens: int
    weight_bytes: int
    installation: str
    choices: dict[str, str]


@dataclass(slots=True)
class Processed:
    """A request whose logits are processed.

    Attributes:
        tokens: its known tokens, a list that the scheduler extends.
        has_grammar: whether a grammar bars tokens, of which ranks get masks (`Sender.masks`).
        sent: how many of its tokens the ranks know; None = they do not know the request.
    """

    params: SamplingParams
    tokens: Sequence[int]
    prompt_len: int
    stop_ids: Sequence[int]
    has_grammar: bool = False
    sent: int | None = None


@dataclass(slots=True)
class Step:
    """One step.

    Attributes:
        entries: (id, start, count, samples, tokens, row, table or None, blocks added to the known table).
        rows: (parameters or None for known ones, seed, index) of each entry that samples.
        ended: ids that ranks forget.
        processed: new requests whose logits are processed.
        grown: id -> new tokens of such a request.
    """

    entries: list[tuple[Any, ...]]
    rows: list[tuple[Any, ...]]
    ended: list[str] = field(default_factory=list)
    processed: dict[str, Processed] = field(default_factory=dict)
    grown: dict[str, list[int]] = field(default_factory=dict)


class Sender:
    """What the ranks know, on the side of the driver. It has the interface of `LogitsProcessors` as far as an engine uses it."""

    def __init__(self) -> None:
        self._processed: dict[str, Processed] = {}
        self._grammars: dict[str, ProcessedRequest] = {}
        self.reset()

    def reset(self) -> None:
        """The ranks are new and know nothing."""
        self._tables: dict[str, tuple[list[int], int]] = {}
        self._params: dict[str, SamplingParams] = {}
        self._ended: list[str] = []
        for request in self._processed.values():
            request.sent = None

    def __len__(self) -> int:
        return len(self._processed)

    def add(
        self,
        request_id: str,
        params: SamplingParams,
        tokens: Sequence[int],
        prompt_len: int,
        stop_ids: Sequence[int],
        grammar: Grammar | None = None,
    ) -> None:
        """Process the request's rows from now on; as `LogitsProcessors.add`. A grammar stays here."""
        self._processed[request_id] = Processed(params, tokens, prompt_len, stop_ids, grammar is not None)
        if grammar is not None:
            none = BadWords(())
            self._grammars[request_id] = ProcessedRequest(
                request_id, params, tokens, prompt_len, tuple(stop_ids), none, grammar, consumed=prompt_len
            )

    def remove(self, request_id: str) -> None:
        """The request has ended."""
        self._processed.pop(request_id, None)
        self._grammars.pop(request_id, None)
        if self._tables.pop(request_id, None) is not None:
            self._params.pop(request_id, None)
            self._ended.append(request_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._processed

    def with_grammars(self, entries: Sequence[ScheduledRequest]) -> list[str]:
        """The requests among the entries of a step that sample within a grammar."""
        return [entry.id for entry in entries if entry.samples and entry.id in self._grammars]

    def masks(self, names: Sequence[str]) -> dict[str, NDArray[np.int32]]:
        """Which tokens the grammars of these requests allow after their known ones, int32 [words] as of `next_tokens`; nothing for those that have
        ended."""
        requests = [self._grammars[name] for name in names if name in self._grammars]
        grammars = [one.advanced_grammar(one.grammar) for one in requests if one.grammar is not None]
        if not grammars:
            return {}
        rows = next_tokens(grammars, [()] * len(grammars), pinned=False).numpy()
        return {request.id: row for request, row in zip(requests, rows, strict=True)}

    def explained(self, errors: Mapping[str, ErrorInfo]) -> dict[str, ErrorInfo]:
        """The errors of a step by request id, as a rank names them. It does not know why a grammar allows nothing."""
        return {name: self._explained(name, error) for name, error in errors.items()}

    def _explained(self, name: str, error: ErrorInfo) -> ErrorInfo:
        request = self._grammars.get(name)
        if request is None or error.code != NO_TOKEN_ALLOWED:
            return error
        return request.grammar_failure() or error

    def step(self, entries: Sequence[ScheduledRequest], rows: Sequence[SamplingRow]) -> Step:
        """The message of a committed step, with one of `rows` for each entry that samples. Entries have no drafts."""
        message = Step([], [], self._ended)
        self._ended = []
        sampling = iter(rows)
        for entry in entries:
            table, (known, count) = entry.block_ids, self._tables.get(entry.id, (None, 0))
            # A preempted request gets another list.
            new = (None, table[count:]) if known is table else (list(table), [])
            self._tables[entry.id] = table, len(table)
            message.entries.append(
                (entry.id, entry.start, entry.count, entry.samples, entry.tokens, entry.row, *new)
            )
            if entry.samples:
                row = next(sampling)
                is_known = self._params.get(entry.id) is row.params
                self._params[entry.id] = row.params
                message.rows.append((None if is_known else row.params, row.seed, row.index))
            if (request := self._processed.get(entry.id)) is not None:
                if request.sent is None:
                    tokens = list(request.tokens)
                    message.processed[entry.id] = replace(request, tokens=tokens)
                elif request.sent < len(request.tokens):
                    message.grown[entry.id] = list(request.tokens[request.sent :])
                request.sent = len(request.tokens)
        return message


class Mirror:
    """The requests as a rank knows them."""

    def __init__(self, processors: LogitsProcessors) -> None:
        self._processors = processors
        self._tables: dict[str, list[int]] = {}
        self._params: dict[str, SamplingParams] = {}
        self._tokens: dict[str, list[int]] = {}
        self._grammars: dict[str, HostGrammar] = {}

    def allow(self, masks: Mapping[str, NDArray[np.int32]]) -> None:
        """What the grammars of requests allow in the step that is about to be completed, as of `Sender.masks`."""
        for request_id, mask in masks.items():
            self._grammars[request_id].mask = torch.from_numpy(mask)

    def read(self, message: Step) -> tuple[list[ScheduledRequest], list[SamplingRow]]:
        """The entries of a step and their rows, as the driver has them."""
        for request_id in message.ended:
            self._tables.pop(request_id, None)
            self._params.pop(request_id, None)
            if self._tokens.pop(request_id, None) is not None:
                self._processors.remove(request_id)
                self._grammars.pop(request_id, None)
        for request_id, request in message.processed.items():
            tokens = self._tokens[request_id] = list(request.tokens)
            if request.has_grammar:
                self._grammars[request_id] = HostGrammar()
            self._processors.add(
                request_id,
                request.params,
                tokens,
                request.prompt_len,
                list(request.stop_ids),
                self._grammars.get(request_id),
            )
        for request_id, added in message.grown.items():
            self._tokens[request_id] += added
        entries, rows, sampling = [], [], iter(message.rows)
        for request_id, start, count, samples, tokens, place, table, new_blocks in message.entries:
            if table is not None:
                self._tables[request_id] = table
            blocks = self._tables[request_id]
            blocks += new_blocks
            entries.append(ScheduledRequest(request_id, start, count, samples, tokens, blocks, [], 0, place))
            if samples:
                params, seed, index = next(sampling)
                if params is not None:
                    self._params[request_id] = params
                rows.append(SamplingRow(self._params[request_id], seed, index))
        return entries, rows
