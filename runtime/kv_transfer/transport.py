"""How bytes come from the memory of another process into that of this one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from gristmill.runtime.kv_transfer.layout import Layout
from gristmill.runtime.kv_transfer.peer_memory import (
    Copy,
    PeerMemory,
    PeerMemoryError,
    copy_on_host,
    copy_on_stream,
    export,
)
from gristmill.runtime.kv_transfer.scattered import WORD
from gristmill.runtime.steps_in_flight import StreamEvent


class Source(Protocol):
    """The memory of another process."""

    @property
    def addresses(self) -> Sequence[int]:
        """Where each of its tensors begins, for the copies of `start`."""
        ...

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each."""
        ...

    def start(self, copies: Sequence[Copy], after: StreamEvent | None) -> Callable[[], None]:
        """Begin copies, after an event of this process. Returns what waits until they have ended, or lets the current stream wait for that."""
        ...

    def planes(self, layout: Layout) -> list[Tensor] | None:
        """Its tensors in words, int32 [rows, blocks, words], if kernels of this device can read them; else None."""
        ...

    def close(self) -> None:
        """Give it back, when copies that are under way have ended."""
        ...


class Transport(Protocol):
    """Ways to memory of others, and of others to the memory of this process. Methods raise PeerMemoryError."""

    @property
    def name(self) -> str:
        """Both sides have to have the same one."""
        ...

    def export(self) -> list[dict[str, Any]]:
        """For each tensor what others need to reach it, as JSON."""
        ...

    def connect(self, told: Sequence[Mapping[str, Any]]) -> Source:
        """Reach the memory of a process that has exported it."""
        ...

    def close(self) -> None:
        """Let nobody reach the tensors any more."""
        ...


class MappedTransport:
    """Memory of other processes of this host, mapped into this one: copies need nothing of its owner, and nothing is registered.

    Args:
        tensors: what others may read, contiguous, of one device.
    """

    name = "mapped"

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._device = tensors[0].device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def export(self) -> list[dict[str, Any]]:
        """As `Transport.export`."""
        return [export(tensor) for tensor in self._tensors]

    def connect(self, told: Sequence[Mapping[str, Any]]) -> MappedSource:
        """As `Transport.connect`."""
        return MappedSource(told, self._device, self._stream)

    def close(self) -> None:
        """Nothing: the handles end with the memory."""


class MappedSource:
    """As `Source`, of `MappedTransport`."""

    def __init__(
        self, told: Sequence[Mapping[str, Any]], device: torch.device, stream: torch.cuda.Stream | None
    ) -> None:
        self._stream, self._device = stream, device
        self._memory: list[PeerMemory] = []
        try:
            for one in told:
                self._memory.append(PeerMemory(one, device))
        except PeerMemoryError:
            self.close()
            raise
        self.addresses = [memory.address for memory in self._memory]
        self.sizes = [memory.nbytes for memory in self._memory]

    def planes(self, layout: Layout) -> list[Tensor] | None:
        """As `Source.planes`. They own no memory: whoever uses them has to have ended before `close`."""
        places = list(zip(layout.planes, self._memory, strict=True))
        if any(value % WORD for plane, m in places for value in (plane.part, plane.pitch, m.address)):
            return None
        return [
            _words_at(m.address, (plane.rows, layout.blocks, plane.part), plane.pitch, self._device)
            for plane, m in places
        ]

    def start(self, copies: Sequence[Copy], after: StreamEvent | None) -> Callable[[], None]:
        """As `Source.start`."""
        stream = self._stream
        if stream is None:
            copy_on_host(copies)
            return lambda: None
        if after is not None:
            after.delay(stream)
        copy_on_stream(copies, stream)
        ended = torch.cuda.Event()
        ended.record(stream)
        return lambda: torch.cuda.current_stream().wait_event(ended)

    def close(self) -> None:
        """As `Source.close`."""
        if self._stream is not None:
            self._stream.synchronize()
        for memory in self._memory:
            memory.close()
        self._memory.clear()


def _words_at(address: int, shape: tuple[int, int, int], pitch: int, device: torch.device) -> Tensor:
    """Memory as int32 [rows, blocks, words]; `shape` is in bytes, and rows are `pitch` bytes apart."""
    rows, blocks, part = shape
    nbytes = (rows - 1) * pitch + blocks * part
    # torch has no public way from an address that another allocator owns to a tensor of a device that it is to be used on.
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    words = torch.empty(0, dtype=torch.int32, device=device)
    return words.set_(storage, 0, (rows, blocks, part // WORD), (pitch // WORD, part // WORD, 1))
