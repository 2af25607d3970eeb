"""The numbers of tokens that a host's warm-up prepares kernels for."""

from __future__ import annotations

from collections.abc import Iterator


def powers(limit: int) -> Iterator[int]:
    """1, 2, 4 ... below limit, and limit."""
    value = 1
    while value < limit:
        yield value
        value *= 2
    yield limit
