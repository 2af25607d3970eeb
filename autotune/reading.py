"""The time to read a number of bytes, by a kernel that does nothing else: the memory part of a floor.

Bytes over bandwidth underestimates small sizes: a kernel has to start, to fill the device and to finish; and bytes may lie in a
cache. The bytes are therefore read in the timing mode of the row: over as many copies in turn, in a graph or call by call,
with the same `Timed`. The fastest of a few kernels counts, with its shortest sample. Every kernel must return the sum of
what it reads, so a kernel that skips something is an error and not a low floor.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gristmill.autotune.clock import now
from gristmill.autotune.device import free_bytes, on_device
from gristmill.autotune.timing import GPU_CALLS, Timed, cold_bytes
from gristmill.kernel_registry.scheme import cdiv

ROUNDS, LEAST, SECONDS = 7, 3, 0.05
"""Samples of each kernel; fewer, down to the minimum, if together they take longer than SECONDS."""

SHARE = 0.5
"""The fraction of the free memory that copies may use."""

LINE, STEP = 16, 64
"""Elements of 4 bytes: whole lines of the cache are read, and copies begin at multiples of 256 bytes."""

AMPLITUDE, APART = 1 << 16, 61
"""Integers are below AMPLITUDE, so that the sum of one program fits 32 bits. Ones are APART elements apart, which is no multiple of a
vector: no lane adds up so many that its float32 sum is inexact."""


class ReadError(RuntimeError):
    """A read kernel did not read all of its input."""


@dataclass(frozen=True)
class Reading:
    """The time to read `size` bytes.

    Attributes:
        us: the minimum in microseconds, of `copies` in turn; None if they do not fit in memory.
        how: the fastest kernel, or why there is no time.
        again: whether it was measured twice.
    """

    size: int
    copies: int
    us: float | None
    how: str
    again: bool = False


@dataclass(frozen=True)
class Reader:
    """A read kernel.

    Attributes:
        call: reads one copy.
        total: the sum of the elements that the last call read; called once per call.
    """

    name: str
    call: Callable[[torch.Tensor], object]
    total: Callable[[], float]


_readings: dict[tuple[Any, ...], Reading] = {}
_memory: dict[str, torch.Tensor] = {}


def reading(device: str, size: int, *, copies: int, captured: bool, beaten: float = math.inf) -> Reading:
    """The time to read `size` bytes (the whole lines of 64 among them, one at least), measured once per process.

    Args:
        copies: the number of adjacent copies that are read in turn; 1 = they stay in the cache.
        captured: on a GPU, as a graph.
        beaten: the time of a kernel that reads these bytes. If it is less than the reading, the reading may have been disturbed: it is measured
            once more, and the faster of the two is kept.

    Raises:
        ReadError: a kernel skips elements.
    """
    key = (device, torch.get_num_threads() if device == "cpu" else 0, size, copies, captured)
    best = _readings.get(key)
    if best is None:
        best = _readings[key] = _measured(device, size, copies, captured)
    if best.us is not None and beaten < best.us and not best.again:
        repeated = _measured(device, size, copies, captured)
        faster = repeated if repeated.us is not None and repeated.us < best.us else best
        best = _readings[key] = replace(faster, again=True)
    return best


def forget() -> None:
    """Drop all readings and free their memory."""
    _readings.clear()
    _memory.clear()


def _measured(device: str, size: int, copies: int, captured: bool) -> Reading:
    count = LINE * max(1, size // (4 * LINE))
    step = cdiv(count, STEP) * STEP
    required_bytes, available_bytes = 4 * step * copies, free_bytes(device)
    allocated_bytes = _memory[device].nbytes if device in _memory else 0
    absent = Reading(
        size, copies, None, f"{copies} x {size} bytes are more than half of the memory that is free"
    )
    if required_bytes > allocated_bytes and required_bytes > SHARE * (available_bytes + allocated_bytes):
        return absent
    try:
        with on_device(device):
            data = _room(device, required_bytes // 4)
            views = [data[index * step : index * step + count] for index in range(copies)]
            us, how = min(
                (_least(reader, views, device, captured), reader.name) for reader in _readers(data, count)
            )
    except torch.OutOfMemoryError:
        _memory.pop(device, None)
        return absent
    if data.nbytes > 2 * cold_bytes(device):
        _memory.pop(device, None)
    return Reading(size, copies, us, how)


def _room(device: str, count: int) -> torch.Tensor:
    """Memory for `count` elements: the present allocation, or a larger one in its place."""
    memory = _memory.get(device)
    if memory is None or memory.numel() < count:
        memory = None
        _memory.pop(device, None)
        _memory[device] = memory = _filled(device, count)
    return memory


def _filled(device: str, count: int) -> torch.Tensor:
    """Data whose sum is exact: on a GPU pairs of an integer and its negative, on a CPU float32 zeros with a one in every APART. Every
    page is written, so that it is backed by physical memory."""
    if device == "cpu":
        data = torch.zeros(count, dtype=torch.float32)
        data[::APART] = 1.0
        return data
    data = torch.empty(count, dtype=torch.int32, device=device)
    pairs = data.view(-1, 2)
    pairs[:, 0].random_(1, AMPLITUDE)
    torch.neg(pairs[:, 0], out=pairs[:, 1])
    return data


def _readers(data: torch.Tensor, count: int) -> Iterator[Reader]:
    """Read kernels for `count` elements of memory that is filled like `data`."""
    if data.is_floating_point():
        total = torch.zeros((), dtype=torch.float32)
        yield Reader("sum", lambda view: torch.sum(view, 0, out=total), lambda: float(total))
        yield Reader("dot", lambda view: torch.dot(view, view, out=total), lambda: float(total))
        return
    int_total = torch.zeros((), dtype=torch.int64, device=data.device)
    yield Reader("sum", lambda view: torch.sum(view, 0, out=int_total), lambda: float(int_total))
    if importlib.util.find_spec("triton") is not None:
        yield from _triton(data, count)


def _triton(data: torch.Tensor, count: int) -> Iterator[Reader]:
    from gristmill.autotune import _reading_triton as code

    for block, parts, warps in code.SHAPES:
        programs = cdiv(count, block * parts)
        sink = torch.zeros(programs, dtype=torch.int32, device=data.device)

        def call(
            view: torch.Tensor,
            block: int = block,
            parts: int = parts,
            warps: int = warps,
            programs: int = programs,
            sink: torch.Tensor = sink,
        ) -> None:
            code.read[(programs,)](view, sink, len(view), BLOCK=block, PARTS=parts, num_warps=warps)

        def total(sink: torch.Tensor = sink) -> float:
            total = float(sink.sum())
            sink.zero_()  # the kernel does not write a sum of 0
            return total

        yield Reader(f"{block}x{parts}, {warps} warps", call, total)


def _least(reader: Reader, views: Sequence[torch.Tensor], device: str, captured: bool) -> float:
    """Microseconds of one read, the minimum of several samples."""
    _check(reader, views[-1])
    turn = 0

    def start() -> None:
        nonlocal turn
        turn = 0

    def step() -> None:
        nonlocal turn
        view = views[turn]
        turn = (turn + 1) % len(views)
        reader.call(view)

    calls = None if device == "cpu" else max(len(views), GPU_CALLS)
    timed = Timed(step, device, calls=calls, graph=captured, start=start)
    best, begin = math.inf, now()
    for sample_index in range(ROUNDS):
        if sample_index >= LEAST and now() - begin > SECONDS:
            break
        best = min(best, timed.sample())
    return best


def _check(reader: Reader, view: torch.Tensor) -> None:
    """ReadError unless `reader` adds up all of this copy; of integers with other content than the timed one, whose sum is 0."""
    odd = view[1::2] if not view.is_floating_point() else view[:0]
    odd.neg_()
    expected = float(view.sum(dtype=torch.float64 if view.is_floating_point() else torch.int64))
    reader.call(view)
    total = reader.total()
    odd.neg_()
    if total != expected:
        raise ReadError(
            f"the read kernel {reader.name} sums {view.nbytes} bytes to {total:.9g} instead of {expected:.9g}: "
            "it does not read all of them"
        )
