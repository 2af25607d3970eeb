"""Memory of other processes through NIXL: over NVLink, RDMA, shared memory or TCP. Needs the package ``nixl``, which trusts what it is told."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gristmill.runtime.kv_transfer.layout import Layout
from gristmill.runtime.kv_transfer.nixl import agent_errors, make_agent, state_at_end
from gristmill.runtime.kv_transfer.peer_memory import Copy, PeerMemoryError
from gristmill.runtime.steps_in_flight import StreamEvent

SECONDS = 30.0
"""Time that the copies of one `start` may take."""


class NixlTransport:
    """As `Transport`.

    Args:
        tensors: what others may read, contiguous, of one device.

    Raises:
        UsageError: the package is missing.
    """

    name = "nixl"

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._agent = make_agent(uuid.uuid4().hex, "the store 'device:NAME:nixl'", "device:NAME")
        self._registered = [self._agent.register_memory(tensor) for tensor in tensors]
        self._kind = "DRAM" if tensors[0].device.type == "cpu" else "VRAM"
        self._device = max(0, tensors[0].get_device())

    def export(self) -> list[dict[str, Any]]:
        """As `Transport.export`."""
        agent = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return [
            {"bytes": t.nbytes, "address": t.data_ptr(), "gpu": self._device, "agent": agent}
            for t in self._tensors
        ]

    def connect(self, told: Sequence[Mapping[str, Any]]) -> NixlSource:
        """As `Transport.connect`."""
        errors: tuple[type[Exception], ...] = (KeyError, ValueError, TypeError, *agent_errors())
        try:
            agent = base64.b64decode(told[0]["agent"], validate=True)
            places = [(int(one["address"]), int(one["bytes"]), int(one["gpu"])) for one in told]
            peer = self._agent.add_remote_agent(agent)
        except errors as error:
            raise PeerMemoryError(f"NIXL cannot reach a process: {type(error).__name__}: {error}") from error
        return NixlSource(self._agent, peer, places, self._kind, self._device)

    def close(self) -> None:
        """As `Transport.close`."""
        for memory in self._registered:
            self._agent.deregister_memory(memory)
        self._registered.clear()


class NixlSource:
    """As `Source`, of `NixlTransport`."""

    def __init__(
        self, agent: Any, peer: str | bytes, places: Sequence[tuple[int, int, int]], kind: str, device: int
    ) -> None:
        self._agent, self._kind, self._device = agent, kind, device
        self._peer = peer.decode() if isinstance(peer, bytes) else peer
        self._peer_device = places[0][2]
        self._under_way: list[Any] = []
        self.addresses = [address for address, _, _ in places]
        self.sizes = [size for _, size, _ in places]

    def start(self, copies: Sequence[Copy], after: StreamEvent | None) -> Callable[[], None]:
        """As `Source.start`. NIXL knows no streams: what is launched before has to end first."""
        if after is not None:
            after.synchronize()
        agent = self._agent
        try:
            here = agent.get_xfer_descs(self._rows(copies, "target", self._device), self._kind)
            there = agent.get_xfer_descs(self._rows(copies, "source", self._peer_device), self._kind)
            handle = agent.initialize_xfer("READ", here, there, self._peer)
            self._under_way.append(handle)
            agent.transfer(handle)
        except agent_errors() as error:
            raise PeerMemoryError(f"NIXL cannot read: {type(error).__name__}: {error}") from error

        def wait() -> None:
            state = state_at_end(agent, handle, SECONDS)
            if state != "DONE":
                raise PeerMemoryError(f"NIXL's transfer is {state} after at most {SECONDS:g} s")
            self._under_way.remove(handle)
            agent.release_xfer_handle(handle)

        return wait

    def planes(self, layout: Layout) -> None:
        """As `Source.planes`: it is not mapped."""

    def close(self) -> None:
        """As `Source.close`."""
        with suppress(*agent_errors()):  # its process may have ended
            for handle in self._under_way:
                state_at_end(self._agent, handle, SECONDS)
                self._agent.release_xfer_handle(handle)
            self._agent.remove_remote_agent(self._peer)
        self._under_way.clear()

    def _rows(self, copies: Sequence[Copy], side: str, device: int) -> NDArray[np.uint64]:
        """(address, bytes, device) of every row."""
        rows = [
            getattr(copy, side) + np.arange(copy.rows) * getattr(copy, f"{side}_pitch") for copy in copies
        ]
        found = np.zeros((sum(map(len, rows)), 3), np.uint64)
        found[:, 0] = np.concatenate(rows)
        found[:, 1] = np.repeat([copy.width for copy in copies], [copy.rows for copy in copies])
        found[:, 2] = device
        return found
