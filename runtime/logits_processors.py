"""Logits processors: penalties, biases, bans and grammars of the requests that ask for them, for all rows of a step at once.

State of a request is a slot, a row of tensors on the device that are allocated when the first request needs them: the bias of every
token (logit_bias; -inf for tokens that are never allowed), how often each is in the output, and which are in the prompt. A slot is
written when its request first samples. Afterwards a step sends the tokens that are new since the last one, and the bans that depend
on them. Tokens are counted, and grammars advanced, from the host's list of known tokens, so a step that failed, or a preemption,
counts nothing twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gristmill.runtime.batch import send
from gristmill.runtime.errors import INVALID_LOGITS, ErrorInfo
from gristmill.runtime.sampling_params import SamplingParams
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
    """

    params: SamplingParams
    tokens: Sequence[int]
    prompt_len: int
    stop_ids: tuple[int, ...]
    bad_words: tuple[tuple[list[int], int], ...]  # bad words of several tokens: (all but the last, the last)
    grammar: Grammar | None = None
    slot: int | None = None
    counted: int = 0
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

    def bans(self, drafted: Sequence[int]) -> list[int]:
        """Tokens that are barred after the known tokens and `drafted`, in addition to those that are always barred."""
        banned: list[int] = []
        if len(self.tokens) + len(drafted) - self.prompt_len < self.params.min_tokens:
            banned += self.stop_ids
        for before, last in self.bad_words:
            known = len(before) - len(drafted)
            end = [*self.tokens[-known:], *drafted] if known > 0 else drafted[-len(before) :]
            if list(end) == before:
                banned.append(last)
        return banned


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of logits that is processed: its place among all rows, its request, and the drafts that precede it."""

    place: int
    state: _State
    drafted: Sequence[int]


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
        if state is not None and state.slot is not None:
            self._free.append(state.slot)

    def apply(
        self,
        logits: Tensor,
        request_ids: Sequence[str],
        drafted: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Process the logits [rows, vocab] of these requests: returns `logits` itself if no row is processed, else a new tensor, float32
        [rows, vocab]. Does not synchronize.

        Args:
            drafted: for each row the drafts that precede it, as if they were known; None = no row has any. The rows of a request are one
                after another, each with one draft more than the one before it.
        """
        rows = [
            _Row(place, self._states[name], () if drafted is None else drafted[place])
            for place, name in enumerate(request_ids)
            if name in self._states
        ]
        if not rows:
            return logits
        states = list(dict.fromkeys(row.state for row in rows))
        self._assign_slots(states)
        self._count(states)
        processed = logits.to(torch.float32, copy=True)
        self._apply_grammars(processed, rows)
        for first in range(0, len(rows), ROWS):
            self._process(processed, rows[first : first + ROWS])
        return processed

    def why_no_token(self, request_id: str, logits: Tensor, processed: Tensor) -> ErrorInfo:
        """Why no token could be sampled from a row [vocab], by the model's logits and by what `apply` made of them."""
        state = self._states.get(request_id)
        if (logits.isnan() | (logits == torch.inf)).any() or (logits == -torch.inf).all():
            return INVALID_LOGITS
        if state is None or not (processed == -torch.inf).all():
            return ErrorInfo(
                "invalid_logits",
                "the model's logits were finite, but not what penalties, logit_bias and temperature made of them",
            )
        if state.grammar is not None and state.grammar.failed:
            return ErrorInfo("grammar_failed", f"structured_output cannot go on: {state.grammar.error}")
        return ErrorInfo(
            "no_token_allowed",
            f"{' and '.join(state.limits())} allow no token after {len(state.tokens) - state.prompt_len} tokens of output",
        )

    def legal(self, request_id: str, drafts: Sequence[int]) -> int:
        """How many of the drafts the request's grammar allows after its known tokens; all of them without one."""
        state = self._states.get(request_id)
        if state is None or state.grammar is None:
            return len(drafts)
        return state.advanced_grammar(state.grammar).allowed(drafts)

    def _process(self, logits: Tensor, rows: Sequence[_Row]) -> None:
        """Process these rows of float32 logits [rows, vocab] in place."""
        places, slots = [row.place for row in rows], [_slot(row.state) for row in rows]
        row_index, slot_index = send([*places, *slots], torch.int64, self.device).view(2, len(rows))
        x = logits[row_index]
        if self._bias is not None:
            x += self._bias[slot_index]
        bans = [(i, token) for i, row in enumerate(rows) for token in row.state.bans(row.drafted)]
        if bans:
            _fill(x, bans, -torch.inf)
        if self._counts is not None and self._in_prompt is not None:
            params = [row.state.params for row in rows]
            values = [p.repetition_penalty for p in params]
            values += [p.frequency_penalty for p in params] + [p.presence_penalty for p in params]
            repetition, frequency, presence = send(values, torch.float32, self.device).view(3, len(rows), 1)
            counts = self._counts[slot_index]
            drafts = [(i, t) for i, row in enumerate(rows) if row.state.penalized for t in row.drafted]
            if drafts:
                _add_one(counts, drafts)
            output = counts > 0
            repeated = torch.where(x > 0, x / repetition, x * repetition)
            x = torch.where(output | self._in_prompt[slot_index], repeated, x)
            x -= frequency * counts
            x -= presence * output
        logits[row_index] = x

    def _apply_grammars(self, logits: Tensor, rows: Sequence[_Row]) -> None:
        """Bar, in these rows of float32 logits [rows, vocab], what their grammars do not allow next."""
        places: list[int] = []
        drafts: dict[_State, Sequence[int]] = {}
        for row in rows:
            if row.state.grammar is not None:
                places.append(row.place)
                drafts[row.state] = row.drafted  # at last those of the request's last row, which are all
        if not places:
            return
        grammars = [state.advanced_grammar(state.grammar) for state in drafts if state.grammar is not None]
        mask = next_tokens(grammars, list(drafts.values()), pinned=self.device.type == "cuda")
        for first in range(0, len(places), ROWS):
            row_index = send(places[first : first + ROWS], torch.int64, self.device)
            bar(logits, row_index, mask[first : first + ROWS].to(self.device, non_blocking=True))

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

    def _count(self, states: Sequence[_State]) -> None:
        """Bring prompt and counts up to the known tokens."""
        if self._counts is None or self._in_prompt is None:
            return
        prompt: list[tuple[int, int]] = []
        output: list[tuple[int, int]] = []
        for state in states:
            if state.penalized and state.counted < len(state.tokens):
                slot = _slot(state)
                prompt += [(slot, token) for token in state.tokens[state.counted : state.prompt_len]]
                output += [(slot, t) for t in state.tokens[max(state.counted, state.prompt_len) :]]
        if prompt:
            _fill(self._in_prompt, prompt, True)
        if output:
            _add_one(self._counts, output)
        for state in states:
            state.counted = len(state.tokens)

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
