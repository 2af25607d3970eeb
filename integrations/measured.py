"""Whether a host's layer runs faster on our kernels, measured on this device while the host loads its model.

Both products are called with cold weights, captured in graphs on a GPU, in turns. The times are kept next to the user's store, so that the
next start measures nothing.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gristmill import ops
from gristmill.autotune.store import save
from gristmill.autotune.timing import GPU_CALLS, Timed, list_count, summarize
from gristmill.integrations.layouts import choose_layout
from gristmill.integrations.product import Product
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store, Timing, target_key
from gristmill.kernels.linear.weight import problem_of
from gristmill.quant import quantize

LOG = logging.getLogger("gristmill")
DECODE = (1, 16, 128)
SIZES = (*DECODE, 2048)
"""Numbers of tokens that are timed: of decode steps, and of a prompt."""
BEHIND = 1.02
"""How much longer our kernel may take than the host's for any of them."""
ROUNDS = 7

Call = Callable[[Tensor], Tensor]
"""x [T, K] -> [T, N]."""


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
class Case:
    """A linear layer of a host.

    Attributes:
        host: the name of the program.
        method: what the host multiplies with, and its version: a time counts for these.
    """

    scheme: str
    n: int
    k: int
    dtype: torch.dtype
    host: str
    method: str

    def bytes(self) -> int:
        """At most those of the weight, so that rotated copies are cold: a quarter of a byte per weight."""
        return max(self.n * self.k // 4, 1)


_KNOWN: dict[tuple[Case, str, Path], Comparison] = {}
"""The times known in this process, also if the folder of the store cannot be written."""


def compare(case: Case, device: torch.device, theirs: Callable[[], Call]) -> Comparison:
    """The times of a case: known ones, or measured now.

    Args:
        theirs: makes the host's product with a weight of its own; called several times. Its exceptions are not caught.
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


def _empty_records(case: Case, device: torch.device) -> list[Timing]:
    """Per size ours and the host's, without times: what a store is searched for."""
    resolver, definition = ops.resolver(device), default_registry().op("linear")
    static = problem_of(case.scheme, case.n, case.k, case.dtype)
    plan = ops.bind("linear", static, device, layouts=frozenset({choose_layout("linear", static, device)}))
    timing = "graph,cold" if device.type == "cuda" else "eager,cold"
    records = []
    for size in SIZES:
        entry = plan.entry(size)
        code = resolver.kernel(definition, entry.kernel).code_hash(entry.config, built=True)
        problem = str(definition.at_bucket(definition.problem(static), size))
        place = (problem, target_key(resolver.target), resolver.build.key(), 0.0, (), timing)
        records.append(Timing("linear", entry.kernel, code, entry.config, *place))
        records.append(Timing("linear", case.host, case.method, {"method": case.method}, *place))
    return records


@torch.no_grad()
def _measure(
    case: Case, device: torch.device, theirs: Callable[[], Call], records: Sequence[Timing]
) -> list[Timing]:
    place = str(device)
    copies = list_count(case.bytes(), place)
    # The host's first: what it cannot multiply ends here, before ours is packed.
    rotations = [[theirs() for _ in range(copies)]]
    rotations.insert(0, _ours(case, device, copies))
    made = []
    generator = torch.Generator(device).manual_seed(0)
    for size, *pair in zip(SIZES, records[::2], records[1::2], strict=True):
        x = torch.randn(size, case.k, generator=generator, device=device, dtype=torch.float32).to(case.dtype)
        timed = [
            Timed(_step(rotation, x), place, calls=max(GPU_CALLS, copies) if device.type == "cuda" else None)
            for rotation in rotations
        ]
        samples: tuple[list[float], list[float]] = ([], [])
        for turn in range(ROUNDS + 1):
            for index in (0, 1) if turn % 2 else (1, 0):
                samples[index].append(timed[index].sample())
        for record, raw in zip(pair, samples, strict=True):
            figures = summarize(raw[1:])
            made.append(_with(record, figures.us, figures.samples))
    return made


def _ours(case: Case, device: torch.device, copies: int) -> list[Call]:
    generator = torch.Generator(device).manual_seed(0)
    dense = torch.randn(case.n, case.k, generator=generator, device=device, dtype=torch.float32)
    first = Product(quantize(dense, case.scheme), None, case.dtype, device)
    products = [first]
    for _ in range(copies - 1):
        products.append(copy.copy(first))
        products[-1].tensors = [tensor.clone() for tensor in first.tensors]
    return [product.without_bias for product in products]


def _step(rotation: Sequence[Call], x: Tensor) -> Callable[[], Tensor]:
    turns = itertools.cycle(rotation)
    return lambda: next(turns)(x)


def _with(record: Timing, us: float, samples: tuple[float, ...]) -> Timing:
    fields = (record.op, record.kernel, record.code, record.config, record.problem, record.target)
    return Timing(*fields, record.toolchain, us, samples, record.timing)
