"""What the host knows of requests whose logits are processed, and of their rows in a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from gristmill.kernels.sampling.process_logits import FED, NOTHING
from gristmill.runtime.bad_words import BadWords
from gristmill.runtime.errors import INVALID_LOGITS, ErrorInfo
from gristmill.runtime.grammars import Grammar
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import ScheduledRequest

NO_TOKEN_ALLOWED: Final = "no_token_allowed"


@dataclass(slots=True, eq=False)
class ProcessedRequest:
    """A request whose logits are processed.

    Attributes:
        id: its id.
        tokens: its known tokens, a list that grows.
        slot: None before its first step.
        counted: the number of tokens that its slot contains.
        ended: whether it was removed.
        penalties: those of repetition, of frequency and of presence.
        penalized: whether any of them changes logits.
    """

    id: str
    params: SamplingParams
    tokens: Sequence[int]
    prompt_len: int
    stop_ids: tuple[int, ...]
    bad_words: BadWords
    grammar: Grammar | None = None
    slot: int | None = None
    counted: int = 0
    ended: bool = False
    consumed: int = 0  # known tokens that are the prompt's, or that the grammar has seen
    penalties: tuple[float, float, float] = field(init=False)
    penalized: bool = field(init=False)
    _bars: bool = field(init=False)

    def __post_init__(self) -> None:
        p = self.params
        self.penalties = p.repetition_penalty, p.frequency_penalty, p.presence_penalty
        self.penalized = self.penalties != (1.0, 0.0, 0.0)
        self._bars = bool(p.min_tokens or self.bad_words)

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

    def rows(self, place: int, entry: ScheduledRequest, pending: bool) -> Iterator[ProcessedRow]:
        """The rows of an entry that samples, of which the first is at `place`. pending: whether the host does not know the token that it is fed."""
        for count, drafted in enumerate(_drafted_prefixes(entry)):
            counted, barred = self.counts(drafted, pending), self.bars(drafted, pending)
            yield ProcessedRow(place + count, self, len(self.tokens), drafted, counted, barred, count == 0)

    def why_no_token(self, largest: float, processed: float) -> ErrorInfo:
        """Why no token could be sampled from a row, by the largest of the model's logits, NaN if one is, and of the processed ones."""
        if not math.isfinite(largest):
            return INVALID_LOGITS
        if processed != -math.inf:
            return ErrorInfo(
                "parameters_overflow",
                "the model's logits were finite, but not what penalties, logit_bias and temperature made of them",
            )
        return self.grammar_failure() or ErrorInfo(
            NO_TOKEN_ALLOWED,
            f"{' and '.join(self.limits())} allow no token after {len(self.tokens) - self.prompt_len} tokens of output",
        )

    def grammar_failure(self) -> ErrorInfo | None:
        """Why its grammar cannot go on; None if it can, or there is none."""
        if self.grammar is None or not self.grammar.failed:
            return None
        return ErrorInfo("grammar_failed", f"structured_output cannot go on: {self.grammar.error}")

    def counts(self, drafted: Sequence[int], pending: bool) -> Sequence[int]:
        """Tokens that penalties count besides the known ones, as `process_logits` takes them."""
        if not self.penalized:
            return ()
        return (*drafted, FED) if pending else drafted

    def bars(self, drafted: Sequence[int], pending: bool) -> Sequence[tuple[int, int]]:
        """Tokens that are barred, as pairs that `process_logits` takes."""
        if not self._bars:
            return ()
        bans, bans_after = self.bans(drafted, pending)
        return [*((NOTHING, token) for token in bans), *bans_after]

    def bans(self, drafted: Sequence[int], pending: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens that are barred after the known tokens and `drafted`, in addition to those that are always barred: the tokens; and
        (pending token, barred token) pairs, if a pending token follows the known ones instead of drafts.
        """
        banned: list[int] = []
        after: list[tuple[int, int]] = []
        if len(self.tokens) + pending + len(drafted) - self.prompt_len < self.params.min_tokens:
            banned += self.stop_ids
        if pending:
            after += self.bad_words.ended_by_two(self.tokens)
        else:
            banned += self.bad_words.ended_by(self.tokens, drafted)
        return banned, after


class ProcessedRow(NamedTuple):
    """A row of logits that is processed, as far as the host knows it at its launch.

    Attributes:
        place: its place among all rows of the step.
        known: the number of known tokens of its request.
        drafted: the drafts that precede the row.
        counted, barred: as `ProcessedRequest.counts` and `ProcessedRequest.bars` return them.
        first: whether it is its request's first.
    """

    place: int
    request: ProcessedRequest
    known: int
    drafted: Sequence[int]
    counted: Sequence[int]
    barred: Sequence[tuple[int, int]]
    first: bool


def _drafted_prefixes(entry: ScheduledRequest) -> list[list[int]]:
    """For each row that an entry samples, the drafts that precede it."""
    drafts = entry.draft_tokens
    return [drafts[:count] for count in range(len(drafts) + 1)]
