"""Logits processors: penalties, biases, bans and grammars of the requests that ask for them, for all rows of a step at once.

State of a request is a slot, a row of tensors on the device that are allocated when the first request needs them: the bias of every
token (logit_bias; -inf for tokens that are never allowed), how often each is in the output, and which are in the prompt. A slot is
written when its request first samples. Afterwards a step sends the tokens that are new since the last one, and the bans that depend
on them. Tokens are counted, and grammars advanced, from the host's list of known tokens, so a step that failed, or a preemption,
counts nothing twice.

A step may be launched before the host knows the token that it feeds, which the step before samples. That one token is read on the
device, and counts in this step only; the slot gets it when the host knows it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gristmill.runtime.batch import fetch, send
from gristmill.runtime.errors import INVALID_LOGITS, ErrorInfo
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import ScheduledRequest
from gristmill.runtime.structured_output import Grammar, bar, next_tokens

ROWS = 64
"""Rows per pass; bounds the memory of intermediate float32 results."""
FIRST_SLOTS = 8


@dataclass(slots=True, eq=False)
class _State:
    """The state of a request.

    Attributes:
        tokens: its known tokens, a list that grows.
        slot: None before its first step.
        counted: the number of tokens that its slot contains.
        ended: whether it was removed.
    """

    params: SamplingParams
    tokens: Sequence[int]
    prompt_len: int
    stop_ids: tuple[int, ...]
    bad_words: tuple[tuple[list[int], int], ...]  # bad words of several tokens: (all but the last, the last)
    grammar: Grammar | None = None
    slot: int | None = None
    counted: int = 0
    ended: bool = False
    consumed: int = 0  # known tokens that are the prompt's, or that the grammar has seen

    @property
    def penalized(self) -> bool:
        p = self.params
        return bool(p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0)

    def advanced_grammar(self, grammar: Grammar) -> Grammar:
        """The request's grammar, advanced past the known tokens."""
        if self.consumed < len(self.tokens):
            grammar.consume(self.tokens[self.consumed :])
            self.consumed = len(self.tokens)
        return grammar

    def limits(self) -> list[str]:
        """The parameters that bar tokens after the known ones."""
        given = {
            "structured_output": self.grammar is not None,
            "allowed_token_ids": self.params.allowed_token_ids is not None,
            "bad_words": bool(self.params.bad_words),
            "min_tokens": len(self.tokens) - self.prompt_len < self.params.min_tokens,
        }
        return [name for name, bars in given.items() if bars]

    def why_no_token(self, largest: float, processed: float) -> ErrorInfo:
        """Why no token could be sampled from a row, by the largest of the model's logits, NaN if one is, and of the processed ones."""
        if not math.isfinite(largest):
            return INVALID_LOGITS
        if processed != -math.inf:
            return ErrorInfo(
                "invalid_logits",
                "the model's logits were finite, but not what penalties, logit_bias and temperature made of them",
            )
        if self.grammar is not None and self.grammar.failed:
            return ErrorInfo("grammar_failed", f"structured_output cannot go on: {self.grammar.error}")
        return ErrorInfo(
            "no_token_allowed",
            f"{' and '.join(self.limits())} allow no token after {len(self.tokens) - self.prompt_len} tokens of output",
        )

    def bans(self, drafted: Sequence[int], pending: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens that are barred after the known tokens and `drafted`, in addition to those that are always barred: the tokens; and
        (pending token, barred token) pairs, if a pending token follows the known ones instead of drafts.
        """
        banned: list[int] = []
        after: list[tuple[int, int]] = []
        if len(self.tokens) + pending + len(drafted) - self.prompt_len < self.params.min_tokens:
            banned += self.stop_ids
        for before, last in self.bad_words:
            words = before[:-1] if pending else before
            known = len(words) - len(drafted)
            end = [*self.tokens[-known:], *drafted] if known > 0 else drafted[len(drafted) - len(words) :]
            if list(end) != words:
                continue
            if pending:
                after.append((before[-1], last))
            else:
                banned.append(last)
        return banned, after


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of logits that is processed, as far as the host knows it at its launch.

    Attributes:
        place: its place among all rows.
        known: the number of known tokens of its request.
        drafted: the drafts that precede the row.
        pending: whether the token that the row is fed follows the known ones, and is on the device only.
        bans, bans_after: as `_State.bans` returns them.
        first: whether it is its request's first.
    """

    place: int
    request_id: str
    state: _State
    known: int
    drafted: Sequence[int]
    pending: bool
    bans: list[int]
    bans_after: list[tuple[int, int]]
    first: bool


class ProcessedRows:
    """The processed rows of a step, whose grammars allow the tokens of `mask` next: as of `next_tokens`, for each row with a grammar."""

    def __init__(self, processors: LogitsProcessors, rows: Sequence[_Row], mask: Tensor | None) -> None:
        self._processors, self._rows, self._mask = processors, rows, mask
        self._largest: Tensor | None = None

    @property
    def places(self) -> list[int]:
        """The places of the rows, ascending."""
        return [row.place for row in self._rows]

    def process(self, logits: Tensor, fed: Tensor) -> Tensor:
        """The processed rows of a step's logits [rows, vocab] as float32 [processed, vocab], on the device without synchronization.

        Args:
            fed: int64 [rows], the token whose successor each row predicts.
        """
        processors, rows, device = self._processors, self._rows, logits.device
        known = {row.state: row.known for row in rows}
        out = torch.empty(len(rows), logits.shape[1], dtype=torch.float32, device=device)
        largest = []
        with processors.prepared(known):
            for first in range(0, len(rows), ROWS):
                some = rows[first : first + ROWS]
                places = send([row.place for row in some], torch.int64, device)
                x = logits[places].to(torch.float32)
                largest.append(x.amax(1))
                out[first : first + len(some)] = processors.edit(x, some, fed[places])
        if self._mask is not None:
            with_grammar = [i for i, row in enumerate(rows) if row.state.grammar is not None]
            for first in range(0, len(with_grammar), ROWS):
                places = send(with_grammar[first : first + ROWS], torch.int64, device)
                bar(out, places, self._mask[first : first + ROWS].to(device, non_blocking=True))
        self._largest = fetch(torch.stack([torch.cat(largest), out.amax(1)]))
        return out

    def errors(self, ids: Sequence[int]) -> dict[str, ErrorInfo]:
        """Why requests end here, by request id: those whose first row has no id, of the ids of all rows. The step has ended. Rows after a draft may
        have no id either, which does not matter."""
        failed = [i for i, row in enumerate(self._rows) if row.first and ids[row.place] < 0]
        if not failed or self._largest is None:
            return {}
        rows, largest = self._rows, self._largest.tolist()
        return {rows[i].request_id: rows[i].state.why_no_token(largest[0][i], largest[1][i]) for i in failed}


class LogitsProcessors:
    """The processed requests of one engine, with logits of `vocab_size` tokens on `device`. Its length is their number."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._states: dict[str, _State] = {}
        self._free: list[int] = []
        self._slots = 0
        self._bias: Tensor | None = None  # float32 [slots, vocab]
        self._counts: Tensor | None = None  # int32 [slots, vocab], of output tokens
        self._in_prompt: Tensor | None = None  # bool [slots, vocab]

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

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
        words = [list(word) for word in params.bad_words if not isinstance(word, str) and len(word) > 1]
        bad = tuple((word[:-1], word[-1]) for word in words)
        self._states[request_id] = _State(
            params, tokens, prompt_len, tuple(stop_ids), bad, grammar, consumed=prompt_len
        )

    def remove(self, request_id: str) -> None:
        """The request has ended; unknown ids are ignored."""
        state = self._states.pop(request_id, None)
        if state is not None:
            state.ended = True
            self._release(state)

    def prepare(self, entries: Sequence[ScheduledRequest]) -> ProcessedRows | None:
        """The rows of a step that are processed, among the 1 + drafts rows of each entry that samples; None if there are none.

        Everything that the host knows is taken now; the device's part, `ProcessedRows.process`, may run later, in the order of steps.
        """
        rows = []
        place = 0
        for entry in entries:
            if not entry.samples:
                continue
            if (state := self._states.get(entry.id)) is not None:
                pending = entry.tokens is None
                for count in range(1 + entry.drafts):
                    drafted = entry.draft_tokens[:count]
                    bans = state.bans(drafted, pending)
                    known = len(state.tokens)
                    rows.append(
                        _Row(place + count, entry.id, state, known, drafted, pending, *bans, count == 0)
                    )
            place += 1 + entry.drafts
        return ProcessedRows(self, rows, self._next_tokens(rows)) if rows else None

    def has_grammar(self, request_id: str) -> bool:
        """Whether a grammar bars tokens of the request."""
        state = self._states.get(request_id)
        return state is not None and state.grammar is not None

    def legal(self, request_id: str, drafts: Sequence[int]) -> int:
        """How many of the drafts the request's grammar allows after its known tokens; all of them without one."""
        state = self._states.get(request_id)
        if state is None or state.grammar is None:
            return len(drafts)
        return state.advanced_grammar(state.grammar).allowed(drafts)

    def edit(self, x: Tensor, rows: Sequence[_Row], fed: Tensor) -> Tensor:
        """Bias, bans and penalties of these rows, from float32 logits [rows, vocab] that may be written over, and the tokens [rows] that they are
        fed."""
        slot_index = send([_slot(row.state) for row in rows], torch.int64, self.device)
        if self._bias is not None:
            x += self._bias[slot_index]
        bans = [(i, token) for i, row in enumerate(rows) for token in row.bans]
        if bans:
            _fill(x, bans, -torch.inf)
        after = [(i, *pair) for i, row in enumerate(rows) for pair in row.bans_after]
        if after:
            _bar_after(x, after, fed)
        if self._counts is not None and self._in_prompt is not None:
            params = [row.state.params for row in rows]
            values = [p.repetition_penalty for p in params]
            values += [p.frequency_penalty for p in params] + [p.presence_penalty for p in params]
            repetition, frequency, presence = send(values, torch.float32, self.device).view(3, len(rows), 1)
            counts = self._counts[slot_index]
            drafts = [(i, t) for i, row in enumerate(rows) if row.state.penalized for t in row.drafted]
            if drafts:
                _add_one(counts, drafts)
            pending = [int(row.pending and row.state.penalized) for row in rows]
            if any(pending):
                counts.scatter_add_(1, fed[:, None], send(pending, torch.int32, self.device)[:, None])
            output = counts > 0
            repeated = torch.where(x > 0, x / repetition, x * repetition)
            x = torch.where(output | self._in_prompt[slot_index], repeated, x)
            x -= frequency * counts
            x -= presence * output
        return x

    def _next_tokens(self, rows: Sequence[_Row]) -> Tensor | None:
        """The tokens that the grammars of rows allow, as of `next_tokens`, one row for each with a grammar; None if none has one."""
        drafts: dict[_State, Sequence[int]] = {}
        for row in rows:
            if row.state.grammar is not None:
                drafts[row.state] = row.drafted  # at last those of the request's last row, which are all
        if not drafts:
            return None
        grammars = [state.advanced_grammar(state.grammar) for state in drafts if state.grammar is not None]
        return next_tokens(grammars, list(drafts.values()), pinned=self.device.type == "cuda")

    @contextmanager
    def prepared(self, known: Mapping[_State, int]) -> Iterator[None]:
        """Bring the slots of these requests up to as many known tokens; a request that has ended meanwhile has one for now."""
        self._assign_slots(list(known))
        try:
            self._count(known)
            yield
        finally:
            for state in known:
                if state.ended:
                    self._release(state)

    def _release(self, state: _State) -> None:
        if state.slot is not None:
            self._free.append(state.slot)
            state.slot = None
            state.counted = 0

    def _assign_slots(self, states: Sequence[_State]) -> None:
        """Give slots to the requests that have none, and initialize them."""
        new = [state for state in states if state.slot is None]
        if not new:
            return
        while len(self._free) < len(new):
            self._grow()
        if self._bias is None and any(_biased(state.params) for state in new):
            self._bias = self._zeros(torch.float32)
        if self._counts is None and any(state.penalized for state in new):
            self._in_prompt = self._zeros(torch.bool)
            self._counts = self._zeros(torch.int32)
        slots = self._free[-len(new) :]
        slot_index = send(slots, torch.int64, self.device)
        for tensor in (self._bias, self._counts, self._in_prompt):
            if tensor is not None:
                tensor.index_fill_(0, slot_index, 0)
        if self._bias is not None:
            params = [(slot, state.params) for slot, state in zip(slots, new, strict=True)]
            _write_bias(self._bias, [(slot, p) for slot, p in params if _biased(p)])
        # Last, so that a request has no slot if writing it fails for lack of memory.
        for slot, state in zip(slots, new, strict=True):
            state.slot = slot
        del self._free[-len(new) :]

    def _count(self, known: Mapping[_State, int]) -> None:
        """Bring prompt and counts up to as many known tokens."""
        if self._counts is None or self._in_prompt is None:
            return
        prompt: list[tuple[int, int]] = []
        output: list[tuple[int, int]] = []
        for state, count in known.items():
            if state.penalized and state.counted < count:
                slot, tokens = _slot(state), state.tokens
                prompt += [(slot, token) for token in tokens[state.counted : state.prompt_len]]
                output += [(slot, t) for t in tokens[max(state.counted, state.prompt_len) : count]]
        if prompt:
            _fill(self._in_prompt, prompt, True)
        if output:
            _add_one(self._counts, output)
        for state, count in known.items():
            state.counted = count

    def _zeros(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self._slots, self.vocab_size, dtype=dtype, device=self.device)

    def _grow(self) -> None:
        """Double the slots; their content is kept."""
        added = max(self._slots, FIRST_SLOTS)
        self._free += range(self._slots, self._slots + added)
        self._slots += added
        for name in ("_bias", "_counts", "_in_prompt"):
            old = getattr(self, name)
            if old is not None:
                new = self._zeros(old.dtype)
                new[: len(old)] = old
                setattr(self, name, new)


def _slot(state: _State) -> int:
    """The slot of a request that has one."""
    if state.slot is None:
        raise RuntimeError("a request without a slot was processed")
    return state.slot


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


def _bar_after(x: Tensor, bans: Sequence[tuple[int, int, int]], fed: Tensor) -> None:
    """Bar a token in a row of logits [rows, vocab] if the row was fed another one: for each (row, other token, token)."""
    rows, others, tokens = send(
        [n for ban in zip(*bans, strict=True) for n in ban], torch.int64, x.device
    ).view(3, -1)
    values = torch.where(fed[rows] == others, -torch.inf, 0.0)
    x.view(-1).index_add_(0, rows * x.shape[1] + tokens, values)


def _places(tensor: Tensor, entries: Sequence[tuple[int, int]]) -> Tensor:
    """Flat int64 indices of (row, token) pairs in a contiguous tensor [rows, vocab]."""
    width = tensor.shape[1]
    return send([row * width + token for row, token in entries], torch.int64, tensor.device)


def _fill(tensor: Tensor, entries: Sequence[tuple[int, int]], value: float) -> None:
    tensor.view(-1).index_fill_(0, _places(tensor, entries), value)


def _add_one(counts: Tensor, entries: Sequence[tuple[int, int]]) -> None:
    """Add one for each (row, token) to a contiguous int32 tensor [rows, vocab]."""
    places = _places(counts, entries)
    counts.view(-1).index_add_(0, places, torch.ones_like(places, dtype=torch.int32))
