"""Whether a host's layer runs faster on our kernels, measured on this device while the host loads its model.

Both are called with cold weights and the same inputs, captured in graphs on a GPU, in turns. The times are kept next to the user's store, so
that the next start measures nothing. A case says what is called: `gristmill.integrations.measured_linear`, `measured_experts`.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from gristmill import ops
from gristmill.autotune.device import free_bytes
from gristmill.autotune.store import save
from gristmill.autotune.timing import GPU_CALLS, Timed, list_count, summarize
from gristmill.integrations.layouts import choose_layout
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store, Timing, target_key

LOG = logging.getLogger("gristmill")
DECODE = (1, 16, 128)
SIZES = (*DECODE, 2048)
"""Numbers of tokens that are timed: of decode steps, and of a prompt."""
BEHIND = 1.02
"""How much longer our kernel may take than the host's for any of them."""
ROUNDS = 7
MAKING = 16
"""Free memory over `Case.bytes` that a copy needs: at most 4 of each program's packed weights, and as much again while they are packed."""

T = TypeVar("T")
Inputs = tuple[Tensor, ...]
"""What a call takes beside the weights."""
Call = Callable[..., Tensor]
"""A product with weights of its own: `Inputs` -> its output."""


@dataclass(frozen=True)
class Comparison:
    """Microseconds by number of tokens: ours and the host's."""

    times: Mapping[int, tuple[float, float]]

    @property
    def ahead(self) -> bool:
        """Ours is faster in the geometric mean over DECODE, and nowhere slower by more than BEHIND."""
        gain = math.prod(theirs / ours for ours, theirs in (self.times[size] for size in DECODE))
        return gain > 1 and all(ours <= BEHIND * theirs for ours, theirs in self.times.values())

    def __str__(self) -> str:
        figures = (f"{size}: {ours:.1f} and {theirs:.1f}" for size, (ours, theirs) in self.times.items())
        return f"us of gristmill and of the host by tokens: {', '.join(figures)}"


@dataclass(frozen=True)
class Case(ABC):
    """A layer of a host.

    Attributes:
        op: the operation that computes it.
        host: the name of the program.
        method: what the host computes it with, and its version: a time counts for these.
    """

    op: ClassVar[str]
    host: str
    method: str

    @abstractmethod
    def problem(self) -> str:
        """The static problem of our kernel."""

    @abstractmethod
    def weights(self) -> int:
        """How many numbers the weights have."""

    @abstractmethod
    def ours(self, device: torch.device, copies: int) -> list[Call]:
        """Our product with arbitrary weights, and copies of it with the same ones in other memory."""

    @abstractmethod
    def inputs(self, size: int, device: torch.device) -> list[Inputs]:
        """Arbitrary inputs of `size` tokens, which calls take one after the other."""

    def bytes(self) -> int:
        """At most those of the weights, so that rotated copies are cold: a quarter of a byte per weight."""
        return max(self.weights() // 4, 1)


_KNOWN: dict[tuple[Case, str, Path], Comparison] = {}
"""The times known in this process, also if the folder of the store cannot be written."""


def compare(case: Case, device: torch.device, theirs: Callable[[], Call]) -> Comparison:
    """The times of a case: known ones, or measured now.

    Args:
        theirs: makes the host's product with weights of its own; called several times. Its exceptions are not caught.
    """
    path = times_file(case.host, device)
    key = (case, str(device), path)
    if key not in _KNOWN:
        records = _empty_records(case, device)
        known = {record.key: record for record in Store.read(path).timings}
        found = [known.get(record.key) for record in records]
        kept = [
            f for f, record in zip(found, records, strict=True) if f is not None and f.code == record.code
        ]
        if len(kept) < len(records):
            kept = _measure(case, device, theirs, records)
            try:
                save(path, kept)
            except OSError as error:
                LOG.warning("gristmill: %s cannot be written, the next start measures again: %s", path, error)
        _KNOWN[key] = Comparison(
            {size: (ours.us, host.us) for size, ours, host in zip(SIZES, kept[::2], kept[1::2], strict=True)}
        )
    return _KNOWN[key]


def times_file(host: str, device: torch.device) -> Path:
    """The file of a host's times, next to the user's store, whose reader knows only kernels of gristmill."""
    store = ops.resolver(device).policy.store_path
    return store.with_name(f"{store.stem}_beside_{host}.json")


def with_copies(first: T, copies: int, *fields: str) -> list[T]:
    """An object and copies of it, each with memory of its own for the tensors of these fields, which are lists."""
    made = [first]
    for _ in range(copies - 1):
        made.append(copy.copy(first))
        for field in fields:
            setattr(made[-1], field, [tensor.clone() for tensor in getattr(first, field)])
    return made


def _empty_records(case: Case, device: torch.device) -> list[Timing]:
    """Per size ours and the host's, without times: what a store is searched for."""
    resolver, definition = ops.resolver(device), default_registry().op(case.op)
    static = case.problem()
    plan = ops.bind(case.op, static, device, layouts=frozenset({choose_layout(case.op, static, device)}))
    timing = "graph,cold" if device.type == "cuda" else "eager,cold"
    records = []
    for size in SIZES:
        entry = plan.entry(size)
        code = resolver.kernel(definition, entry.kernel).code_hash(entry.config, built=True)
        problem = str(definition.at_bucket(definition.problem(static), size))
        place = (problem, target_key(resolver.target), resolver.build.key(), 0.0, (), timing)
        records.append(Timing(case.op, entry.kernel, code, entry.config, *place))
        records.append(Timing(case.op, case.host, case.method, {"method": case.method}, *place))
    return records


@torch.no_grad()
def _measure(
    case: Case, device: torch.device, theirs: Callable[[], Call], records: Sequence[Timing]
) -> list[Timing]:
    place = str(device)
    copies = _copies(case, place)
    # The host's first: what it cannot multiply ends here, before ours is packed.
    rotations = [[theirs() for _ in range(copies)]]
    rotations.insert(0, case.ours(device, copies))
    calls = max(GPU_CALLS, copies) if device.type == "cuda" else None
    made = []
    with _outside_of_contexts():
        for size, *pair in zip(SIZES, records[::2], records[1::2], strict=True):
            inputs = case.inputs(size, device)
            timed = [Timed(_step(rotation, inputs), place, calls=calls) for rotation in rotations]
            samples: tuple[list[float], list[float]] = ([], [])
            for turn in range(ROUNDS + 1):
                for index in (0, 1) if turn % 2 else (1, 0):
                    samples[index].append(timed[index].sample())
            for record, raw in zip(pair, samples, strict=True):
                figures = summarize(raw[1:])
                made.append(_with(record, figures.us, figures.samples))
    return made


@contextmanager
def _outside_of_contexts() -> Iterator[None]:
    """Without the context of a device in which a host makes its layers, but takes no steps: each call of torch takes longer in it, which made
    34 µs of vLLM's experts on a CPU 72."""
    modes = []
    while torch.overrides._get_current_function_mode() is not None:
        modes.append(torch.overrides._pop_mode())
    try:
        yield
    finally:
        for mode in reversed(modes):
            torch.overrides._push_mode(mode)


def _copies(case: Case, place: str) -> int:
    """How many copies of the weights keep calls cold, as far as memory goes."""
    fit = free_bytes(place) // (MAKING * case.bytes())
    return max(1, min(list_count(case.bytes(), place), fit))


def _step(rotation: Sequence[Call], inputs: Sequence[Inputs]) -> Callable[[], Tensor]:
    calls, given = itertools.cycle(rotation), itertools.cycle(inputs)
    return lambda: next(calls)(*next(given))


def _with(record: Timing, us: float, samples: tuple[float, ...]) -> Timing:
    fields = (record.op, record.kernel, record.code, record.config, record.problem, record.target)
    return Timing(*fields, record.toolchain, us, samples, record.timing)
