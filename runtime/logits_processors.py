"""Logits processors: penalties, biases, bans and grammars of the requests that ask for them, for all rows of a step at once.

State of a request is a slot, a row of tensors on the device that are allocated when the first request needs them: the bias of every
token (logit_bias; -inf for tokens that are never allowed), and how often each was seen, in the prompt and in the output. A slot is
written when its request first samples. Afterwards a step sends the tokens that are new since the last one, and the bans that depend
on them. Tokens are counted, and grammars advanced, from the host's list of known tokens, so a step that failed, or a preemption,
counts nothing twice. One call of `process_logits` does the rest, with one copy of what it needs from the host.

A step may be launched before the host knows the token that it feeds, which the step before samples. That one token is read on the
device, and counts in this step only; the slot gets it when the host knows it. A grammar must know all tokens: its rows are processed, and
sampled, behind the rest of the step (`GrammarRows`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gristmill.autotune.bound import BoundPlan
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernels.common import dtype_name
from gristmill.kernels.sampling.process_logits import NOTHING, PART
from gristmill.runtime.bad_words import BadWords
from gristmill.runtime.batch import columns, send, send_arrays
from gristmill.runtime.errors import ErrorInfo
from gristmill.runtime.grammars import Grammar, HostGrammar, given_tokens, next_tokens
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.processed_requests import ProcessedRequest, ProcessedRow
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import ScheduledRequest

FIRST_SLOTS = 8
IN_PROMPT, IN_OUTPUT = 1, 2
"""What a token of the prompt, and each one of the output, adds to the state `seen` of `process_logits`."""


class ProcessedRows:
    """Processed rows of a step. `mask` has what grammars allow next, as `next_tokens` returns it, for each row with a grammar."""

    def __init__(
        self, processors: LogitsProcessors, rows: Sequence[ProcessedRow], mask: Tensor | None = None
    ) -> None:
        self._processors, self._rows, self._mask = processors, rows, mask
        self._largest: Tensor | None = None

    @property
    def places(self) -> list[int]:
        """The places of the rows, ascending."""
        return [row.place for row in self._rows]

    def process(
        self, logits: Tensor, fed: Tensor, arrays: Sequence[NDArray[Any]] = ()
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The processed rows of a step's logits [rows, vocab] as float32 [processed, vocab], and their places, int64 [processed], on the device
        without synchronization.

        Args:
            fed: int64 [at least rows], the token whose successor each row predicts.
            arrays: others that are sent in the same copy, and returned as tensors.
        """
        known = {row.request: row.known for row in self._rows}
        with self._processors.prepared(known):
            out, self._largest, places, sent = self._processors.edit(
                logits, fed, self._rows, self._mask, arrays
            )
        return out, places, sent

    def errors(self, ids: Sequence[int]) -> dict[str, ErrorInfo]:
        """Why requests end here, by request id: those whose first row has no id, of the ids of all rows. The step has ended. Rows after a draft may
        have no id either, which does not matter."""
        failed = [i for i, row in enumerate(self._rows) if row.first and ids[row.place] < 0]
        if not failed or self._largest is None:
            return {}
        largest, errors = self._largest.amax(2).tolist(), {}
        for i in failed:
            request = self._rows[i].request
            errors[request.id] = request.why_no_token(largest[0][i], largest[1][i])
        return errors


class GrammarRows:
    """Rows of a step whose grammars must know the tokens of all steps before it: (place of the first row, entry, request)."""

    def __init__(
        self,
        processors: LogitsProcessors,
        entries: Sequence[tuple[int, ScheduledRequest, ProcessedRequest]],
    ) -> None:
        self._processors, self._entries = processors, entries

    def ready(self) -> ProcessedRows | None:
        """The rows, now that the results of all steps before are known; None if their requests have ended."""
        rows = [
            row
            for place, entry, request in self._entries
            if not request.ended
            for row in request.rows(place, entry, pending=False)
        ]
        return ProcessedRows(self._processors, rows, self._processors.mask(rows)) if rows else None


class LogitsProcessors:
    """The processed requests of one engine, with logits of `vocab_size` tokens, on the device of `plans`. Its length is their number."""

    def __init__(self, vocab_size: int, plans: Plans) -> None:
        self.vocab_size = vocab_size
        self.device = plans.device
        self._plans = plans
        self._bound: dict[torch.dtype, BoundPlan] = {}
        self._plan(plans.dtype)
        self._requests: dict[str, ProcessedRequest] = {}
        self._free: list[int] = []
        self._slots = 0
        self._bias = self._zeros(
            torch.float32
        )  # [slots, vocab]; 0 slots before the first request with a bias
        self._seen = self._zeros(
            torch.int32
        )  # [slots, vocab], as of `process_logits`; 0 slots before the first request with a penalty
        self._no_mask = torch.empty(0, cdiv(vocab_size, 32), dtype=torch.int32, device=self.device)

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(
        self,
        request_id: str,
        params: SamplingParams,
        tokens: Sequence[int],
        prompt_len: int,
        stop_ids: Sequence[int],
        grammar: Grammar | None = None,
    ) -> None:
        """Process the request's rows from now on.

        Args:
            params: its bad_words must be token ids, all below the vocabulary's size.
            tokens: the known tokens of the request, a list that the scheduler extends.
            stop_ids: tokens that are barred until min_tokens.
            grammar: the grammar of its output.
        """
        bad = BadWords(word for word in params.bad_words if not isinstance(word, str) and len(word) > 1)
        self._requests[request_id] = ProcessedRequest(
            request_id, params, tokens, prompt_len, tuple(stop_ids), bad, grammar, consumed=prompt_len
        )

    def remove(self, request_id: str) -> None:
        """The request has ended; unknown ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            request.ended = True
            self._release(request)

    def prepare(self, entries: Sequence[ScheduledRequest]) -> tuple[ProcessedRows | None, GrammarRows | None]:
        """The rows of a step that are processed, among the 1 + drafts rows of each entry that samples: those without and with a grammar, None if
        there are none.

        What the host knows is taken now; the device's part, `ProcessedRows.process`, may run later, in the order of steps.
        """
        rows: list[ProcessedRow] = []
        with_grammar = []
        place = 0
        for entry in entries:
            if not entry.samples:
                continue
            if (request := self._requests.get(entry.id)) is not None:
                if request.grammar is not None:
                    with_grammar.append((place, entry, request))
                else:
                    rows += request.rows(place, entry, pending=entry.tokens is None)
            place += 1 + entry.drafts
        return (
            ProcessedRows(self, rows) if rows else None,
            GrammarRows(self, with_grammar) if with_grammar else None,
        )

    def legal(self, request_id: str, drafts: Sequence[int]) -> int:
        """How many of the drafts the request's grammar allows after its known tokens; all of them without one."""
        request = self._requests.get(request_id)
        if request is None or request.grammar is None:
            return len(drafts)
        return request.advanced_grammar(request.grammar).allowed(drafts)

    def edit(
        self,
        logits: Tensor,
        fed: Tensor,
        rows: Sequence[ProcessedRow],
        mask: Tensor | None = None,
        arrays: Sequence[NDArray[Any]] = (),
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Bias, bans, penalties and grammars of these rows, whose requests have slots: float32 [processed, vocab], the largest values as
        `process_logits` returns them, the rows' places, int64 [processed], and the arrays as tensors on the device.

        Args:
            logits: those of a step, [rows, vocab]; fed: int64 [at least rows], the token whose successor each row predicts.
            mask: on the host, as `next_tokens` returns it, for each row with a grammar.
            arrays: others that are sent in the same copy.
        """
        order, count = iter(range(len(rows))), len(rows)
        requests = [row.request for row in rows]
        masked = [NOTHING if request.grammar is None else next(order) for request in requests]
        penalties = np.array([request.penalties for request in requests], np.float32).T
        places, integers, numbers, counted, barred, *sent = send_arrays(
            [
                np.array([row.place for row in rows], np.int64),
                columns([[_slot(request) for request in requests], masked], np.int32),
                penalties,
                _padded([row.counted for row in rows], NOTHING),
                _padded([row.barred for row in rows], (NOTHING, NOTHING)),
                *arrays,
            ],
            self.device,
        )
        slots, mask_rows = integers[:, :count].unbind()
        words = self._no_mask if mask is None else mask.to(self.device, non_blocking=True)
        out, largest = self._process(logits, places, fed, slots, numbers, counted, barred, words, mask_rows)
        return out, largest, places, sent

    def rehearse(self, logits: Tensor) -> Tensor:
        """What a step calls for these logits [rows, vocab], all of them processed, without requests: for a warm-up."""
        rows, device = len(logits), self.device
        places = torch.arange(rows, device=device)
        numbers = torch.ones(3, rows, dtype=torch.float32, device=device)
        nothing = torch.full((rows,), NOTHING, dtype=torch.int32, device=device)
        barred = torch.full((rows, 1, 2), NOTHING, dtype=torch.int32, device=device)
        counted = nothing[:, None]
        return self._process(
            logits, places, places, nothing, numbers, counted, barred, self._no_mask, nothing
        )[0]

    def _process(
        self,
        logits: Tensor,
        places: Tensor,
        fed: Tensor,
        slots: Tensor,
        penalties: Tensor,
        *rest: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """`process_logits` with the state of all slots."""
        rows, v = len(places), self.vocab_size
        out = torch.empty(rows, v, dtype=torch.float32, device=self.device)
        largest = torch.empty(2, rows, cdiv(v, PART), dtype=torch.float32, device=self.device)
        self._plan(logits.dtype)(
            logits, places, fed, slots, penalties, self._seen, self._bias, *rest, out, largest
        )
        return out, largest

    def _plan(self, dtype: torch.dtype) -> BoundPlan:
        if dtype not in self._bound:
            x = dtype_name(dtype)
            self._bound[dtype] = self._plans.bind("process_logits", v=self.vocab_size, x=x)
        return self._bound[dtype]

    def mask(self, rows: Sequence[ProcessedRow]) -> Tensor | None:
        """The tokens that the grammars of rows allow, as of `next_tokens`, one row for each with a grammar; None if none has one."""
        drafts: dict[ProcessedRequest, Sequence[int]] = {}
        for row in rows:
            if row.request.grammar is not None:
                drafts[row.request] = row.drafted  # at last those of the request's last row, which are all
        if not drafts:
            return None
        grammars = [
            request.advanced_grammar(request.grammar) for request in drafts if request.grammar is not None
        ]
        pinned = self.device.type == "cuda"
        given = [grammar for grammar in grammars if isinstance(grammar, HostGrammar)]
        if given:  # then all are
            return given_tokens(given, [1 + len(d) for d in drafts.values()], self.vocab_size, pinned)
        return next_tokens(grammars, list(drafts.values()), pinned)

    @contextmanager
    def prepared(self, known: Mapping[ProcessedRequest, int]) -> Iterator[None]:
        """Bring the slots of these requests up to as many known tokens; a request that has ended meanwhile has one for now."""
        self._assign_slots(list(known))
        try:
            self._count(known)
            yield
        finally:
            for request in known:
                if request.ended:
                    self._release(request)

    def _release(self, request: ProcessedRequest) -> None:
        if request.slot is not None:
            self._free.append(request.slot)
            request.slot = None
            request.counted = 0

    def _assign_slots(self, requests: Sequence[ProcessedRequest]) -> None:
        """Give slots to the requests that have none, and initialize them."""
        new = [request for request in requests if request.slot is None]
        if not new:
            return
        while len(self._free) < len(new):
            self._grow()
        if not len(self._bias) and any(_biased(request.params) for request in new):
            self._bias = self._zeros(torch.float32)
        if not len(self._seen) and any(request.penalized for request in new):
            self._seen = self._zeros(torch.int32)
        slots = self._free[-len(new) :]
        slot_index = send(slots, torch.int64, self.device)
        for tensor in (self._bias, self._seen):
            if len(tensor):
                tensor.index_fill_(0, slot_index, 0)
        if len(self._bias):
            params = [(slot, request.params) for slot, request in zip(slots, new, strict=True)]
            _write_bias(self._bias, [(slot, p) for slot, p in params if _biased(p)])
        # Last, so that a request has no slot if writing it fails for lack of memory.
        for slot, request in zip(slots, new, strict=True):
            request.slot = slot
        del self._free[-len(new) :]

    def _count(self, known: Mapping[ProcessedRequest, int]) -> None:
        """Bring prompt and counts up to as many known tokens."""
        if not len(self._seen):
            return
        prompt: list[tuple[int, int]] = []
        output: list[tuple[int, int]] = []
        for request, count in known.items():
            if request.penalized and request.counted < count:
                slot, tokens = _slot(request), request.tokens
                prompt += [(slot, token) for token in tokens[request.counted : request.prompt_len]]
                output += [(slot, t) for t in tokens[max(request.counted, request.prompt_len) : count]]
        if prompt:
            _fill(self._seen, prompt, IN_PROMPT)
        if output:
            _add(self._seen, output, IN_OUTPUT)
        for request, count in known.items():
            request.counted = count

    def _zeros(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self._slots, self.vocab_size, dtype=dtype, device=self.device)

    def _grow(self) -> None:
        """Double the slots; their content is kept."""
        added = max(self._slots, FIRST_SLOTS)
        self._free += range(self._slots, self._slots + added)
        self._slots += added
        for name in ("_bias", "_seen"):
            old = getattr(self, name)
            if len(old):
                new = self._zeros(old.dtype)
                new[: len(old)] = old
                setattr(self, name, new)


def _slot(request: ProcessedRequest) -> int:
    """The slot of a request that has one."""
    if request.slot is None:
        raise RuntimeError("a request without a slot was processed")
    return request.slot


def _biased(params: SamplingParams) -> bool:
    return bool(
        params.logit_bias
        or params.allowed_token_ids is not None
        or any(len(word) == 1 for word in params.bad_words)
    )


def _write_bias(bias: Tensor, slots: Sequence[tuple[int, SamplingParams]]) -> None:
    """Write the biases and bans of the parameters to zeroed slots."""
    limited = [(slot, p.allowed_token_ids) for slot, p in slots if p.allowed_token_ids is not None]
    if limited:
        bias.index_fill_(0, send([slot for slot, _ in limited], torch.int64, bias.device), -torch.inf)
        _fill(bias, [(slot, token) for slot, allowed in limited for token in allowed], 0.0)
    shifts = [(slot, token, value) for slot, p in slots for token, value in p.logit_bias.items()]
    if shifts:
        values = send([value for _, _, value in shifts], torch.float32, bias.device)
        bias.view(-1).index_add_(0, _places(bias, [(slot, token) for slot, token, _ in shifts]), values)
    words = [(slot, word[0]) for slot, p in slots for word in p.bad_words if len(word) == 1]
    if words:
        _fill(bias, [(slot, token) for slot, token in words if isinstance(token, int)], -torch.inf)


def _padded(rows: Sequence[Sequence[Any]], nothing: int | tuple[int, int]) -> NDArray[np.int32]:
    """Lists of tokens, or of pairs of them, as one array [rows, longest] or [rows, longest, 2]."""
    if not (longest := max(map(len, rows))):
        return np.empty((len(rows), 0, *np.shape(nothing)), np.int32)
    padded = [[*row, *([nothing] * (longest - len(row)))] for row in rows]
    return np.array(padded, np.int32).reshape(len(rows), longest, *np.shape(nothing))


def _places(tensor: Tensor, entries: Sequence[tuple[int, int]]) -> Tensor:
    """Flat int64 indices of (row, token) pairs in a contiguous tensor [rows, vocab]."""
    width = tensor.shape[1]
    return send([row * width + token for row, token in entries], torch.int64, tensor.device)


def _fill(tensor: Tensor, entries: Sequence[tuple[int, int]], value: float) -> None:
    tensor.view(-1).index_fill_(0, _places(tensor, entries), value)


def _add(seen: Tensor, entries: Sequence[tuple[int, int]], value: int) -> None:
    """Add a value for each (row, token) to a contiguous int32 tensor [rows, vocab]."""
    places = _places(seen, entries)
    seen.view(-1).index_add_(0, places, torch.full_like(places, value, dtype=torch.int32))
