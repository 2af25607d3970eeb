"""Drafts from the request's own text and from past outputs, by the longest match of its end.

After SuffixDecoding (Oliaro et al., 2024, arXiv:2411.04975), which keeps suffix trees of prompts and outputs; here an index of short
n-grams finds the places where the text's end came before, and the matches are extended backwards from there. A draft is the token that
followed most of the matches, the longer ones counting more; it ends where their agreement becomes weak, or after as many tokens as
were matched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from gristmill.runtime.speculation import DraftContext, DraftRequest, ProposerSpec

ANCHOR = 3
"""Tokens of the n-grams that are indexed, and so of the shortest match."""
PLACES = 16
"""Places that are kept for an n-gram: the last ones."""
LONGEST = 32
"""Tokens that a match is extended to; beyond that all are equally good."""
CONFIDENCE = 0.3
"""Product of the shares of the matches that agree with each draft, below which a draft ends."""
PAST_TOKENS = 1 << 17
"""Tokens of past outputs that are kept, by default: those that ended last."""


@dataclass(slots=True, eq=False)
class _Text:
    """Tokens that matches are looked up in. The n-grams before the first `indexed` tokens are in the index; `alive` = not removed from it."""

    tokens: Sequence[int]
    indexed: int = ANCHOR
    alive: bool = True


@dataclass(slots=True)
class _Index:
    """n-gram -> the places after its last occurrences, oldest first: (text, position of the token that follows)."""

    places: dict[tuple[int, ...], list[tuple[_Text, int]]] = field(default_factory=dict)

    def extend(self, text: _Text) -> None:
        """Index the n-grams that end before one of the text's new tokens."""
        tokens, places = text.tokens, self.places
        first, end = text.indexed, len(tokens)
        if first >= end:
            return
        columns = [tokens[first - ANCHOR + i : end - ANCHOR + i] for i in range(ANCHOR)]
        for key, place in zip(zip(*columns, strict=True), range(first, end), strict=True):
            if (known := places.get(key)) is None:
                places[key] = [(text, place)]
                continue
            if len(known) == PLACES:
                del known[0]
            known.append((text, place))
        text.indexed = end

    def remove(self, text: _Text) -> None:
        """Drop a text and its places."""
        text.alive = False
        tokens = text.tokens
        for key in {tuple(tokens[end - ANCHOR : end]) for end in range(ANCHOR, text.indexed)}:
            kept = [place for place in self.places.get(key, ()) if place[0].alive]
            if kept:
                self.places[key] = kept
            else:
                self.places.pop(key, None)

    def matches(self, tokens: Sequence[int]) -> list[tuple[int, _Text, int]]:
        """(length of the match, text, position after it) of the places that end as `tokens` do."""
        if len(tokens) < ANCHOR:
            return []
        end = tokens[-LONGEST:]
        matches = []
        for text, place in self.places.get(tuple(tokens[-ANCHOR:]), ()):
            length, longest = ANCHOR, min(len(end), place)
            while length < longest and text.tokens[place - length - 1] == end[-length - 1]:
                length += 1
            matches.append((length, text, place))
        return matches


class SuffixProposer:
    """An index for each request, and one of past outputs with at most `past_tokens` tokens, all in host memory."""

    runner = None

    def __init__(self, past_tokens: int = PAST_TOKENS) -> None:
        self._past = _Index()
        self._past_texts: deque[_Text] = deque()
        self._past_length = 0
        self._most_past = past_tokens
        self._own: dict[str, tuple[_Index, _Text]] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """The continuation that the matches of the text's end agree on."""
        drafts = []
        for request in requests:
            if request.id not in self._own:
                self._own[request.id] = _Index(), _Text(request.tokens)
            index, text = self._own[request.id]
            index.extend(text)
            matches = index.matches(request.tokens) + self._past.matches(request.tokens)
            drafts.append(_agreed(matches, request.count))
        return drafts

    def ended(self, request_id: str, tokens: Sequence[int], prompt_len: int) -> None:
        """Keep the output, with the end of its prompt, for later requests; the oldest outputs make room."""
        self._own.pop(request_id, None)
        output = tuple(tokens[max(0, prompt_len - ANCHOR) :][: self._most_past])
        if len(output) <= ANCHOR:
            return
        text = _Text(output)
        self._past_texts.append(text)
        self._past_length += len(output)
        while self._past_length > self._most_past:
            oldest = self._past_texts.popleft()
            self._past_length -= len(oldest.tokens)
            self._past.remove(oldest)
        self._past.extend(text)

    def reset(self) -> None:
        """Forget requests and past outputs: other weights write other texts."""
        self._past, self._past_length = _Index(), 0
        self._past_texts.clear()
        self._own.clear()


def _agreed(matches: Sequence[tuple[int, _Text, int]], count: int) -> list[int]:
    """Up to `count` tokens: each the one that most of the matches which agree so far go on with, weighted by their lengths."""
    longest = max((length for length, _, _ in matches), default=0)
    drafts: list[int] = []
    confidence = 1.0
    while len(drafts) < min(count, longest):
        votes: dict[int, int] = {}
        step = len(drafts)
        matches = [match for match in matches if match[2] + step < len(match[1].tokens)]
        for length, text, place in matches:
            token = text.tokens[place + step]
            votes[token] = votes.get(token, 0) + length * length
        if not votes:
            break
        token = max(votes, key=votes.__getitem__)
        confidence *= votes[token] / sum(votes.values())
        if confidence < CONFIDENCE:
            break
        drafts.append(token)
        matches = [match for match in matches if match[1].tokens[match[2] + step] == token]
    return drafts


def make(context: DraftContext) -> SuffixProposer:
    """A proposer that needs nothing of the engine."""
    return SuffixProposer()


PROPOSER = ProposerSpec(
    name="suffix",
    summary="what followed the end of the text earlier in the request, or in past outputs",
    tokens=8,
    make=make,
)
