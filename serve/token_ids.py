"""Token ids in requests."""

from __future__ import annotations

from collections.abc import Sequence

from gristmill.serve.errors import ApiError
from gristmill.serve.generation import beside
from gristmill.serve.service import Service


async def check_ids(service: Service, name: str, ids: Sequence[int], param: str) -> None:
    """ApiError: one is not in the vocabulary. `name` is what they are called there."""
    wrong = await beside(len(ids), _first_unknown, ids, service.vocab_size)
    if wrong is not None:
        raise ApiError(400, f"{name}: token ids are 0 to {service.vocab_size - 1}, got {wrong}", param=param)


def _first_unknown(ids: Sequence[int], vocab_size: int) -> int | None:
    # Each by itself: other threads run in between, which they do not within min and max of millions.
    return next((token for token in ids if not 0 <= token < vocab_size), None)
