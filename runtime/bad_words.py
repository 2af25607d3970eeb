"""Words of several tokens that a request must not generate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


class BadWords:
    """Words of several tokens, of which the last one is barred where the others precede it.

    They are kept by what precedes, so that the cost of a step depends on how many lengths there are, not on how many words.
    """

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        self._last = dict[int, dict[tuple[int, ...], list[int]]]()
        self._last_two = dict[int, dict[tuple[int, ...], list[tuple[int, int]]]]()
        for word in words:
            *before, previous, last = word
            self._last.setdefault(len(word) - 1, {}).setdefault((*before, previous), []).append(last)
            self._last_two.setdefault(len(before), {}).setdefault(tuple(before), []).append((previous, last))

    def __bool__(self) -> bool:
        return bool(self._last)

    def ended_by(self, tokens: Sequence[int], drafted: Sequence[int] = ()) -> Iterator[int]:
        """The last tokens of the words whose others end `tokens` and `drafted`."""
        for length, words in self._last.items():
            yield from words.get(_end(tokens, drafted, length), ())

    def ended_by_two(self, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The last two tokens of the words whose others end `tokens`."""
        for length, words in self._last_two.items():
            yield from words.get(_end(tokens, (), length), ())


def _end(tokens: Sequence[int], drafted: Sequence[int], length: int) -> tuple[int, ...]:
    """The last `length` of the tokens and the drafts behind them, or all if there are fewer."""
    known = length - len(drafted)
    return (*tokens[-known:], *drafted) if known > 0 else tuple(drafted[len(drafted) - length :])
