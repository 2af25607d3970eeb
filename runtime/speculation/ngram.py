"""Drafts from the request's own text: what followed the last tokens where they came before (prompt lookup).

Prompt lookup decoding (Saxena, 2023, https://github.com/apoorvumang/prompt-lookup-decoding). An index of the n-grams of each request
grows with its tokens, so a step costs what is new, not what is known.
"""

from __future__ import annotations

from collections.abc import Sequence

from gristmill.runtime.speculation import DraftContext, DraftRequest, ProposerSpec

SHORTEST, LONGEST = 2, 4
"""Tokens at the end of the text that are looked up: the longest match wins, of several the last one."""


class _Index:
    """The n-grams, of the sizes in a range, of a text that are followed by a token: n-gram -> position of the token after its last occurrence."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.shortest, self.longest = shortest, longest
        self.places: dict[tuple[int, ...], int] = {}
        self.length = 0  # tokens whose predecessors are indexed

    def extend(self, tokens: Sequence[int]) -> None:
        """Index the n-grams that end before one of the new tokens. The end of the text is not followed by anything yet."""
        end = len(tokens)
        for size in range(self.shortest, self.longest + 1):
            first = max(self.length, size)
            if first < end:
                # Columns of the n-grams that end before first, first + 1, ...: loops run inside of zip and update.
                columns = [tokens[first - size + i : end - size + i] for i in range(size)]
                self.places.update(zip(zip(*columns, strict=True), range(first, end), strict=True))
        self.length = end

    def after(self, tokens: Sequence[int], count: int) -> list[int]:
        """`count` tokens that followed the longest indexed end of the text; [] if no end of it is indexed.

        A copy that reaches the end of the text goes on with its own tokens, as in LZ77: a text that repeats itself goes on so.
        """
        for size in range(min(self.longest, len(tokens)), self.shortest - 1, -1):
            place = self.places.get(tuple(tokens[-size:]))
            if place is not None:
                copied = list(tokens[place : place + count])
                while len(copied) < count:
                    copied.append(copied[place + len(copied) - len(tokens)])
                return copied
        return []


class NgramProposer:
    """An index of n-grams of `shortest` to `longest` tokens for each request, in host memory."""

    runner = None

    def __init__(self, shortest: int = SHORTEST, longest: int = LONGEST) -> None:
        self._sizes = shortest, longest
        self._indices: dict[str, _Index] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """What followed the longest earlier occurrence of the last tokens."""
        drafts = []
        for request in requests:
            index = self._indices.setdefault(request.id, _Index(*self._sizes))
            index.extend(request.tokens)
            drafts.append(index.after(request.tokens, request.count))
        return drafts

    def ended(self, request_id: str, tokens: Sequence[int], prompt_len: int) -> None:
        """Drop the request's index."""
        self._indices.pop(request_id, None)

    def reset(self) -> None:
        """Drop all indices."""
        self._indices.clear()


def make(context: DraftContext) -> NgramProposer:
    """A proposer that needs nothing of the engine."""
    return NgramProposer()


PROPOSER = ProposerSpec(
    name="ngram",
    summary="what followed the last tokens earlier in the request",
    tokens=4,
    make=make,
)
