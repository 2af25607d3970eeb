"""Steps in flight: the host prepares a step while the device computes the one before it.

The device does everything in the order in which it was launched, so only two things need care. A token that a step samples is not known
to the host when the next step is launched: it stays on the device, in the row of its request (`SampledTokens`). And memory of the
host is read, or written, by copies that are still to come: what a step needs of it is its own until the step has ended (`StepRing`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gristmill.runtime.hidden_states import HiddenStates
    from gristmill.runtime.step_details import StepDetails

DEPTH = 2
"""Steps that may be in flight."""


class SampledTokens:
    """The token that was sampled last for each row, on the device, int64 [rows + 1]. The last place belongs to no request: padding reads
    and writes it."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows = rows
        self.values = torch.zeros(rows + 1, dtype=torch.int64, device=device)

    def read(self, rows: Tensor) -> Tensor:
        """The tokens, int64 [n], of these rows, int64 [n]."""
        return self.values[rows]

    def write(self, rows: Tensor, ids: Tensor) -> None:
        """The ids [n] that were sampled for these rows [n], each once but for the last place. A negative id, of a row without a
        result, becomes 0: its request has ended, and a step that is in flight already must be able to compute it."""
        self.values.index_copy_(0, rows, ids.clamp(min=0))


class StreamEvent:
    """An event on the current stream of a GPU, which need not be the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()

    def record(self) -> None:
        """It will have happened when everything that was launched so far has ended."""
        self._event.record(torch.cuda.current_stream(self._device))

    def delay(self, stream: torch.cuda.Stream) -> None:
        """What is launched on a stream from now on begins after it."""
        stream.wait_event(self._event)

    def synchronize(self) -> None:
        """Wait for it; at once if it was never recorded."""
        self._event.synchronize()


@dataclass(slots=True)
class LaunchedStep:
    """A step that the device computes, or has computed.

    Attributes:
        slot: its place in the ring.
        host: int64, pinned on a GPU, where its ids arrive.
        count: the number of ids.
        open: whether its ids can still be asked for.
        details: what else is read of it; None = nothing.
        hidden: the hidden states that it has left; None = none are kept.
    """

    slot: int
    host: Tensor
    ended: StreamEvent | None
    count: int = 0
    open: bool = False
    details: StepDetails | None = None
    hidden: HiddenStates | None = None

    def launch(self, work: Callable[[], Tensor | None]) -> None:
        """Launch the device's part of the step: `work`, with everything that reads the slot's memory, and the copy of the sampled ids
        [at least count] that it returns; None = the step samples nothing."""
        try:
            self.compute(work)
            self.open = True
        finally:  # what was launched before an exception reads the slot, too
            if self.ended is not None:
                self.ended.record()

    def compute(self, work: Callable[[], Tensor | None]) -> None:
        """As `launch`, without the event."""
        ids = work()
        if ids is not None:
            self.host[: self.count].copy_(ids[: self.count], non_blocking=True)

    def ids(self) -> list[int]:
        """Wait for the end of the step; its ids."""
        if self.ended is not None:
            self.ended.synchronize()
        ids: list[int] = self.host[: self.count].tolist()
        return ids


class StepRing:
    """Host memory of the steps in flight, one slot for each."""

    def __init__(self, device: torch.device, depth: int = DEPTH) -> None:
        self.device = device
        self._slots = [LaunchedStep(slot, self._memory(0), self._event()) for slot in range(depth)]
        self._launched = 0

    def take(self, count: int) -> LaunchedStep:
        """A step that will sample `count` ids, in the slot of the oldest one. Waits until the device is done with what that step had in
        the slot.

        Raises RuntimeError if the ids of that step are still to be collected.
        """
        slot = self._launched % len(self._slots)
        last = self._slots[slot]
        if last.open:
            raise RuntimeError(
                f"{len(self._slots)} steps are in flight: collect or drop the oldest one first"
            )
        if last.ended is not None:
            last.ended.synchronize()
        host = last.host if len(last.host) >= count else self._memory(2 * count)
        step = self._slots[slot] = LaunchedStep(slot, host, last.ended, count)
        self._launched += 1
        return step

    def _memory(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int64, pin_memory=self.device.type == "cuda")

    def _event(self) -> StreamEvent | None:
        return StreamEvent(self.device) if self.device.type == "cuda" else None
