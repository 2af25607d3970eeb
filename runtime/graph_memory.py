"""The memory that the CUDA graphs of a model take, measured as they are captured, and its bound."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from gristmill.autotune.captures import only_what_has_run
from gristmill.autotune.errors import UnpreparedError
from gristmill.runtime.errors import is_out_of_memory
from gristmill.runtime.parallel.mesh import Mesh

NO_MEMORY = "there was no memory to capture it"
OVER_BOUND = "the memory that graph_memory allows is used up"
ELSEWHERE = "another rank cannot capture it"
REASONS = ("", NO_MEMORY)
MIB = 1 << 20
DRIVER = 64 * MIB
"""The most that a capture is taken to cost beside the memory of torch's allocator: nodes of a graph take the driver some kilobytes each. What
the device lost beyond that went to other processes."""
SHARE = 0.05
"""The default bound, as a fraction of the device's memory."""


class GraphMemory:
    """A count of the bytes that captures take on a device.

    Args:
        memory: the most bytes (an int), or a fraction of the device's memory (a float); None = `SHARE` of it.
        agree: returns, by place, the greatest of some numbers over all ranks of a model; all of them call it.

    Attributes:
        used: bytes of all captures so far, those given back not counted.
        is_full: whether a capture has gone over the bound, on any rank: no further one is tried.
    """

    def __init__(
        self,
        memory: int | float | None,
        device: torch.device,
        agree: Callable[[Sequence[int]], Sequence[int]] = list,
    ) -> None:
        self.device = device
        self.used = 0
        self.is_full = False
        self._memory = memory
        self._agree = agree

    @property
    def bound(self) -> int:
        """The most bytes."""
        if isinstance(self._memory, int):
            return self._memory
        return int((self._memory or SHARE) * total_bytes(self.device))

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count what the block takes: of torch's allocator, which a graph keeps, and of the driver. One that fails has given it back."""
        before, own = free_bytes(self.device), reserved_bytes(self.device)
        yield
        lost, grown = before - free_bytes(self.device), reserved_bytes(self.device) - own
        self.add(max(0, grown, min(lost, grown + DRIVER)))

    def settled(self, reason: str) -> str:
        """Why steps cannot use what was captured, "" if they can: the same on all ranks, which call this after each capture.

        A graph that one rank replays and another one has not got would leave both waiting in a collective call.

        Args:
            reason: why this rank could not capture it; "" if it could.
        """
        own = REASONS.index(reason) if reason in REASONS else len(REASONS)
        full, worst = self._agree([int(self.is_full), own])
        self.is_full = bool(full)
        if worst > own:
            return REASONS[worst] if worst < len(REASONS) else ELSEWHERE
        return reason or (OVER_BOUND if self.is_full else "")

    def add(self, nbytes: int) -> None:
        """Count what a capture took."""
        self.used += nbytes
        self.is_full = self.is_full or self.used > self.bound

    def give_back(self, nbytes: int | None = None) -> None:
        """Captures were given up that took so many bytes; None = all, and there is room again."""
        if nbytes is None:
            self.used, self.is_full = 0, False
        else:
            self.used -= nbytes

    def __str__(self) -> str:
        return f"graphs take {self.used / MIB:.0f} MiB, and graph_memory allows {self.bound / MIB:.0f}"


class StepMemoryError(Exception):
    """A rank has no memory for a step that all ranks have begun."""


@contextmanager
def together(mesh: Mesh) -> Iterator[None]:
    """A step of all ranks that runs: one rank without memory for it ends them all (`StepMemoryError`), since the others wait for its values."""
    try:
        yield
    except Exception as error:
        if mesh.world == 1 or not is_out_of_memory(error):
            raise
        raise StepMemoryError(
            f"rank {mesh.rank} has no memory for a step (a smaller cache by memory or num_blocks leaves more): {error}"
        ) from None


def run_and_capture(run: Callable[[], None], capture: Callable[[], None], at_once: bool) -> None:
    """Run a step and capture it. at_once: without the run, unless the step calls a kernel that has not run, or cannot be captured so."""
    if at_once:
        try:
            with only_what_has_run():
                return capture()
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
    run()
    return capture()


def why_not_captured(capture: Callable[[], None]) -> tuple[str, str]:
    """Run a capture; why steps cannot be captured, "" if they can, and where there was no memory, what torch said of it.

    Nothing holds the frames of an exception afterwards, and so the tensors in them.
    """
    try:
        capture()
    except UnpreparedError as error:
        return str(error), ""
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return NO_MEMORY, str(error)
    return "", ""


def free_bytes(device: torch.device) -> int:
    """Free bytes of a GPU, as its driver counts them: what torch's allocator keeps is not free."""
    return torch.cuda.mem_get_info(device)[0]


def reserved_bytes(device: torch.device) -> int:
    """Bytes that torch's allocator has of a GPU: as `torch.cuda.memory_reserved`, which makes all other statistics, too."""
    # There are no statistics before the first allocation.
    reserved = torch.cuda.memory.memory_stats_as_nested_dict(device).get("reserved_bytes")
    return int(reserved["all"]["current"]) if reserved else 0


def total_bytes(device: torch.device) -> int:
    """All bytes of a GPU, or of the machine for a CPU."""
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    total: int = torch.cuda.get_device_properties(device).total_memory
    return total
