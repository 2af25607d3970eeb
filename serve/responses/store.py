"""The responses that a server keeps, in memory and within limits."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from gristmill.serve.encoding import encode
from gristmill.serve.errors import ApiError
from gristmill.serve.responses.items import Item


@dataclass
class Stored:
    """A response that is kept.

    Attributes:
        owner: whose key it was made with; nobody else sees it.
        items: its whole input, with that of the responses before it.
        task: generates it in the background; None = it is complete.
        background: it was made there.
        events: those that a stream of it has, by their numbers; None = they are not kept.
        changed: is set when there are more of them, or the end, and then another one takes its place.
    """

    owner: str
    response: Item
    items: Sequence[Item]
    task: asyncio.Task[None] | None = None
    background: bool = False
    events: list[bytes] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    size: int = field(default=0, init=False)

    def add(self, events: Sequence[bytes]) -> None:
        """The next events; none = it has ended."""
        if self.events is not None:
            self.events += events
        self.changed.set()
        self.changed = asyncio.Event()


class ResponseStore:
    """The responses used last.

    Args:
        entries: how many are kept.
        most_bytes: how much JSON they and their inputs have together. A response that is larger by itself is not kept.
    """

    def __init__(self, entries: int, most_bytes: int) -> None:
        self._entries, self._most_bytes = entries, most_bytes
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def bytes(self) -> int:
        """The size of what is kept."""
        return self._bytes

    def put(self, stored: Stored) -> bool:
        """Keep a response, or a newer state of it; the ones that were used least recently make room. Returns whether there is any.

        Responses that are being generated stay.
        """
        name = stored.response["id"]
        self._drop(name)
        stored.size = len(encode(stored.response)) + len(encode(stored.items))
        stored.size += sum(map(len, stored.events or ()))
        idle = [key for key, one in self._stored.items() if one.task is None]
        while len(self) >= self._entries or self._bytes + stored.size > self._most_bytes:
            if not idle:
                return False
            self._drop(idle.pop(0))
        self._stored[name] = stored
        self._bytes += stored.size
        return True

    def holds(self, stored: Stored) -> bool:
        """Whether it is still kept."""
        return self._stored.get(stored.response["id"]) is stored

    def get(self, name: str, owner: str) -> Stored:
        """A response. ApiError 404: it is not kept here, or not this owner's."""
        found = self._stored.get(name)
        if found is None or found.owner != owner:
            raise ApiError(404, f"Response with id '{name}' not found.", code="response_not_found")
        self._stored.move_to_end(name)
        return found

    def delete(self, name: str, owner: str) -> None:
        """Forget a response; what generates it ends. ApiError as `get`."""
        found = self.get(name, owner)
        if found.task is not None:
            found.task.cancel()
        self._drop(name)

    def items(self, owner: str) -> dict[str, Item]:
        """All items of the inputs and outputs of an owner, by their ids."""
        found: dict[str, Item] = {}
        for stored in self._stored.values():
            if stored.owner == owner:
                output: Sequence[Item] = stored.response["output"]
                found |= {one["id"]: one for one in (*stored.items, *output)}
        return found

    def _drop(self, name: str) -> None:
        if (found := self._stored.pop(name, None)) is not None:
            self._bytes -= found.size
