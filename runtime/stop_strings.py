"""Stop strings: text ends before the first of them, independent of the boundaries of tokens and steps."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on until a stop string is complete; text that may be the beginning of one is held back.

    The output does not depend on how the text is split into pieces. Of several stop strings the one that is complete first ends
    the text; of those complete at the same character, the longest.

    strings: the stop strings, none of them empty. include: whether the one that ends the text is part of it.
    """

    def __init__(self, strings: Sequence[str], include: bool = False) -> None:
        self._strings = tuple(strings)
        self._include = include
        self._held = ""  # the longest suffix of the text so far that is a prefix of a stop string
        self.matched: str | None = None

    def push(self, text: str, armed: bool = True) -> str:
        """More text; returns what is certain. `matched` is set where a stop string is complete, and nothing comes after it.

        armed: False where no stop string may be complete inside of this text; one may begin in it.
        """
        if self.matched is not None:
            return ""
        buffer = self._held + text
        if armed and (match := self._first(buffer, len(self._held))) is not None:
            start, self.matched = match
            self._held = ""
            return buffer[: start + len(self.matched)] if self._include else buffer[:start]
        length = self._beginning(buffer)
        self._held = buffer[len(buffer) - length :]
        return buffer[: len(buffer) - length]

    def finish(self) -> str:
        """The text that was held back, at the end."""
        held, self._held = self._held, ""
        return held

    def _first(self, buffer: str, known: int) -> tuple[int, str] | None:
        """(start, string) of the stop string that is complete first, behind the first `known` characters."""
        best: tuple[int, int, str] | None = None
        for string in self._strings:
            start = buffer.find(string, max(0, known - len(string) + 1))
            if start >= 0 and (best is None or (start + len(string), start) < best[:2]):
                best = (start + len(string), start, string)
        return None if best is None else best[1:]

    def _beginning(self, buffer: str) -> int:
        """Length of the longest suffix of the buffer that is a proper prefix of a stop string."""
        longest = max((len(string) for string in self._strings), default=0)
        for length in range(min(longest - 1, len(buffer)), 0, -1):
            end = buffer[len(buffer) - length :]
            if any(len(string) > length and string.startswith(end) for string in self._strings):
                return length
        return 0
