"""Bad words of several tokens against a search through all of them."""

from __future__ import annotations

import random

import pytest

from gristmill.runtime.bad_words import BadWords


class Counted(list[int]):
    """A list that counts how often its end is read."""

    reads = 0

    def __getitem__(self, key):  # type: ignore[no-untyped-def]
        self.reads += 1
        return super().__getitem__(key)


@pytest.mark.parametrize("seed", range(5))
def test_what_a_search_finds(seed: int) -> None:
    draw = random.Random(seed)
    words = [[draw.randrange(3) for _ in range(draw.randint(2, 5))] for _ in range(60)]
    bad = BadWords(words)
    for _ in range(200):
        tokens = [draw.randrange(3) for _ in range(draw.randint(0, 6))]
        drafted = [draw.randrange(3) for _ in range(draw.randint(0, 6))]
        seen = [*tokens, *drafted]
        expected = [
            word[-1]
            for word in words
            if seen[len(seen) - len(word) + 1 :] == word[:-1] and len(seen) >= len(word) - 1
        ]
        assert sorted(bad.ended_by(tokens, drafted)) == sorted(expected)
        pairs = [
            (word[-2], word[-1])
            for word in words
            if len(tokens) >= len(word) - 2 and tokens[len(tokens) - len(word) + 2 :] == word[:-2]
        ]
        assert sorted(bad.ended_by_two(tokens)) == sorted(pairs)


def test_a_step_costs_as_much_as_there_are_lengths() -> None:
    draw = random.Random(0)
    bad = BadWords([draw.randrange(9) for _ in range(length)] for length in (3, 4, 7) for _ in range(1000))
    tokens = Counted(draw.randrange(9) for _ in range(50))
    list(bad.ended_by(tokens)), list(bad.ended_by_two(tokens))
    assert tokens.reads == 6


def test_none() -> None:
    assert not BadWords([]) and BadWords([[1, 2]])
    assert list(BadWords([[1, 2]]).ended_by([])) == [] and list(BadWords([[1, 2]]).ended_by_two([])) == [
        (1, 2)
    ]
