"""Which replica takes a request: the next one, or the one that has computed the longest part of the prompt."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from gristmill.runtime.errors import UsageError

Route = Literal["prefix", "round_robin"]
PIECE = 64  # characters or token ids of a prompt that are compared at once
REMEMBERED = 1 << 16  # pieces of prompts, those used last
SLACK = 4  # requests by which the replica with the prefix may be ahead of twice the load of the idlest one


class Router:
    """Chooses replicas. ``round_robin``: in turn. ``prefix``: the replica that was sent the longest prefix of the prompt, unless it has far
    more to do than the idlest one, which else takes it: as SGLang's router does."""

    def __init__(self, route: Route) -> None:
        if route not in get_args(Route):
            raise UsageError(f"route must be one of {', '.join(get_args(Route))}, got {route!r}")
        self._route = route
        self._turns = itertools.count()
        self._owners: OrderedDict[int, int] = OrderedDict()

    def choose(self, prompt: str | Sequence[int], loads: Mapping[int, int]) -> int:
        """One of the replicas in `loads`, at least one, by their unfinished requests."""
        turn = next(self._turns)
        if self._route == "round_robin":
            return sorted(loads)[turn % len(loads)]
        chosen = min(loads, key=lambda replica: (loads[replica], (replica - turn) % len(loads)))
        limit = 2 * loads[chosen] + SLACK
        pieces = _pieces(prompt)
        for piece in reversed(pieces):
            owner = self._owners.get(piece)
            if owner is not None and owner in loads:
                chosen = owner if loads[owner] <= limit else chosen
                break
        for piece in pieces:
            self._owners[piece] = chosen
            self._owners.move_to_end(piece)
        while len(self._owners) > REMEMBERED:
            self._owners.popitem(last=False)
        return chosen


def _pieces(prompt: str | Sequence[int]) -> list[int]:
    """Chained hashes of the whole pieces of a prompt."""
    hashes: list[int] = []
    for end in range(PIECE, len(prompt) + 1, PIECE):
        hashes.append(hash((*hashes[-1:], *prompt[end - PIECE : end])))
    return hashes
