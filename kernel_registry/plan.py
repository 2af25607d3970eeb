"""Plans: the kernel of a layer at each size of its dynamic axis, over weight layouts that fit in memory.

All kernels of a plan read weights that exist; an entry is selected at its bucket's upper bound. Tensor-parallel ranks take the choices of
rank 0, and compare `Plan.digest`.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.layout import Layout
from gristmill.kernel_registry.op import LAST_BUCKET, Op
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.kernel_registry.select import Candidate, NoKernelError, Selection
from gristmill.kernel_registry.target import Target

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 1024, 2048, 4096)
"""The largest size of each bucket. Between 64 and 512, where a product takes as long as its tiles of rows, there are four to an octave:
a kernel for 256 rows would multiply 256 of 160."""
FINE = 512
"""`BUCKET_OF` has the sizes up to this one. From here on buckets are octaves."""
BUCKET_OF = tuple(bisect_left(BUCKETS, size) for size in range(FINE + 1))
OCTAVES = BUCKETS.index(FINE) - FINE.bit_length() + 1
"""What is added to the octave of a larger size."""

MAX_LAYOUTS = 2
"""Most layouts in which a plan may keep one weight, if memory allows."""

MORE_MEMORY_PAYS = 1.01
"""The speedup from which `more_memory` reports a plan that exceeds the bound on memory."""

ROW_BLOCK = 16
"""The bound on memory of a policy counts the rows of a weight in blocks of this size, to which layouts pad."""


def bucket_index(size: int) -> int:
    """Index of the bucket that contains `size`: 0 for 1, 1 for 2, 2 for 3..4, ... len(BUCKETS) for everything above 4096."""
    if size <= FINE:
        return BUCKET_OF[max(size, 0)]
    return min((size - 1).bit_length() + OCTAVES, len(BUCKETS))


def octave_share(size: int) -> float:
    """The weight of the bucket of `size` in a comparison over all of them: the part of an octave that it holds."""
    return 0.25 if 64 < size <= FINE else 1.0


def bucket_sizes() -> tuple[int, ...]:
    """The size at which each bucket is selected and timed."""
    return (*BUCKETS, LAST_BUCKET)


@dataclass(frozen=True)
class PlanEntry:
    """One bucket of a plan, up to `m_max`, which is None for the last one."""

    m_max: int | None
    kernel: str
    layout: str | None
    config: Config
    source: str
    expected_us: float | None

    def as_dict(self) -> dict[str, object]:
        """The row that `explain --json` prints."""
        return {
            "m_max": self.m_max,
            "kernel": self.kernel,
            "layout": self.layout,
            "config": dict(self.config),
            "expected_us": self.expected_us,
            "source": self.source,
        }

    @classmethod
    def of(cls, size: int, candidate: Candidate, layouts: Collection[str]) -> PlanEntry:
        """The entry of the bucket of `size`: a candidate, with the first layout that it reads among `layouts`."""
        return cls(
            m_max=size if size in BUCKETS else None,
            kernel=candidate.kernel.name,
            layout=next((name for name in candidate.kernel.layouts if name in layouts), None),
            config=dict(candidate.config or {}),
            source=candidate.source or "priority",
            expected_us=candidate.expected_us,
        )


@dataclass(frozen=True)
class Plan:
    """The result of selection for a layer: a kernel and configuration for each bucket, over `layouts`."""

    op: str
    problem: Problem
    entries: tuple[PlanEntry, ...]
    layouts: tuple[str, ...]

    def digest(self) -> str:
        """A digest that ranks of a tensor-parallel group compare: it is equal if they run the same plan."""
        text = json.dumps(
            [self.op, str(self.problem), self.layouts, [e.as_dict() for e in self.entries]], sort_keys=True
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def readable(
    kernels: Sequence[Kernel],
    layouts: Mapping[str, Layout],
    target: Target,
    build: Build,
    without: Collection[str] = (),
) -> dict[str, Layout]:
    """The layouts read by at least one kernel that the device and the installation can run. Others need no packing."""
    read = {
        name
        for k in kernels
        if not k.requires.check_hardware(target, build) and not k.requires.check_build(target, build)
        for name in k.layouts
    }
    return {name: layout for name, layout in layouts.items() if name in read and name not in without}


SelectAt = Callable[[Problem, frozenset[str] | None], Selection]


def make_plan(
    op: Op,
    static: Problem,
    layouts: Mapping[str, Layout],
    policy: Policy,
    select_at: SelectAt,
    *,
    sizes: Sequence[int] | None = None,
    weights: Mapping[int, float] | None = None,
    peek: SelectAt | None = None,
) -> Plan:
    """The plan of `op` for the static problem `static`.

    Args:
        select_at: selection (or resolution, which also verifies) for one concrete problem among kernels of some layouts.
        sizes: bucket sizes to plan for; None = all.
        weights: the weight of each bucket size; None = `octave_share`.
        peek: selection without verification, if `select_at` verifies. Layouts that cannot win by its estimate are not tried.
    """
    sizes = tuple(sizes) if sizes is not None else bucket_sizes() if op.bucket else (1,)
    if strange := sorted(set(sizes) - set(bucket_sizes())):
        raise ValueError(
            f"plan of {op.name}: {strange[0]} is no bucket's size; expected some of {bucket_sizes()}"
        )
    choices, too_large = _layout_choices(op, static, layouts, policy)
    best: tuple[_Cost, Plan] | None = None
    failure: NoKernelError | None = None

    def total(entries: list[tuple[PlanEntry, Candidate]]) -> _Cost:
        pins = sum(_pin(policy, candidate) for _, candidate in entries)
        us = sum(
            _score(c) * (weights or {}).get(size, octave_share(size))
            for size, (_, c) in zip(sizes, entries, strict=True)
        )
        return pins, us

    estimates: list[tuple[_Cost, frozenset[str] | None]] = []
    for choice in choices:
        try:
            estimates.append(
                (total(_entries(op, static, sizes, choice, peek)) if peek is not None else (0, 0.0), choice)
            )
        except NoKernelError as error:
            failure = failure or error
    for estimate, choice in sorted(estimates, key=lambda pair: pair[0]):
        if peek is not None and best is not None and not _cheaper(estimate, best[0]):
            break
        try:
            entries = _entries(op, static, sizes, choice, select_at)
        except NoKernelError as error:
            failure = failure or error
            continue
        cost = total(entries)
        used = tuple(sorted({entry.layout for entry, _ in entries if entry.layout}))
        plan = Plan(op.name, static, tuple(entry for entry, _ in entries), used)
        # A second packing must be faster to justify its memory: at equal cost the smaller set, which comes first, wins.
        if best is None or _cheaper(cost, best[0]):
            best = (cost, plan)
    if best is None:
        raise NoKernelError(
            "\n".join([str(failure or f"no weight layout serves {op.name} {static}"), *too_large])
        )
    return best[1]


@dataclass(frozen=True)
class MoreMemory:
    """The gain of a plan without a bound on memory.

    Attributes:
        layouts: its layouts.
        memory: their bytes relative to those of the weight.
        faster: its speedup over the bounded plan, the geometric mean over all buckets by `octave_share`; None if a time is not known and
            declared priority decides.
    """

    layouts: tuple[str, ...]
    memory: float
    faster: float | None


def more_memory(
    op: Op, static: Problem, layouts: Mapping[str, Layout], policy: Policy, peek: SelectAt, plan: Plan
) -> MoreMemory | None:
    """What `plan`, a plan of every bucket, would gain without `policy.weight_memory`; None if nothing. peek does not verify."""
    rich = make_plan(op, static, layouts, replace(policy, weight_memory=math.inf), peek)
    if not plan.layouts or {*rich.layouts} <= {*plan.layouts}:
        return None
    scheme = QuantScheme.parse(static.text(next(axis.name for axis in op.axes if axis.kind == "scheme")))
    shapes = _weights(op, static)
    nbytes = sum(layouts[name].nbytes(scheme, n, k) for name in rich.layouts for n, k in shapes)
    gains = [
        octave_share(a.m_max or LAST_BUCKET) * math.log(a.expected_us / b.expected_us)
        for a, b in zip(plan.entries, rich.entries, strict=True)
        if a.expected_us and b.expected_us
    ]
    octaves = sum(octave_share(entry.m_max or LAST_BUCKET) for entry in plan.entries)
    faster = math.exp(sum(gains) / octaves) if len(gains) == len(plan.entries) else None
    if faster is not None and faster < MORE_MEMORY_PAYS:
        return None
    return MoreMemory(rich.layouts, nbytes / sum(scheme.weight_bytes(n, k) for n, k in shapes), faster)


def _weights(op: Op, static: Problem) -> Sequence[tuple[int, int]]:
    """(N, K) of each packed weight of a layer."""
    return op.weights(static) if op.weights is not None else ((static.integer("n"), static.integer("k")),)


def _layout_choices(
    op: Op, static: Problem, layouts: Mapping[str, Layout], policy: Policy
) -> tuple[list[frozenset[str] | None], list[str]]:
    """(sets of layouts that fit in memory, small sets first; a message for each layout that does not fit).

    The sets are [None] for an operation without packed weights.
    """
    scheme_axis = next((axis.name for axis in op.axes if axis.kind == "scheme"), None)
    if scheme_axis is None or not layouts:
        return [None], []
    scheme = QuantScheme.parse(static.text(scheme_axis))
    shapes = _weights(op, static)
    supported = {name: layout for name, layout in layouts.items() if layout.accepts(scheme)}
    sizes = {name: sum(layout.nbytes(scheme, n, k) for n, k in shapes) for name, layout in supported.items()}
    allowed = policy.weight_memory * sum(scheme.weight_bytes(n, k) for n, k in shapes)
    # The bound is meant to exclude second copies, not the padding of a small weight to the row block of a layout.
    padded = policy.weight_memory * sum(
        scheme.weight_bytes(cdiv(n, ROW_BLOCK) * ROW_BLOCK, k) for n, k in shapes
    )
    names = sorted(sizes)
    # Padding along K may still exceed it. The smallest layout is then the only choice, since one is needed.
    fitting = [name for name in names if sizes[name] <= padded] or sorted(
        names, key=lambda name: sizes[name]
    )[:1]
    choices = [frozenset((name,)) for name in fitting]
    for count in range(2, MAX_LAYOUTS + 1):
        choices += [
            frozenset(c) for c in combinations(names, count) if sum(sizes[name] for name in c) <= allowed
        ]
    too_large = [
        f"  layout {name} takes {sizes[name]} bytes; the policy's weight_memory {policy.weight_memory} allows {allowed:.0f}"
        for name in names
        if name not in fitting
    ]
    return list(choices), too_large


def _entries(
    op: Op,
    static: Problem,
    sizes: Sequence[int],
    choice: frozenset[str] | None,
    select_at: SelectAt,
) -> list[tuple[PlanEntry, Candidate]]:
    chosen = []
    for size in sizes:
        candidate = select_at(op.at_bucket(static, size), choice).require()
        chosen.append((PlanEntry.of(size, candidate, choice or ()), candidate))
    return chosen


_Cost = tuple[int, float]
"""Cost of a set of layouts: the sum of the kernels' ranks among the policy's pins, then microseconds."""


def _pin(policy: Policy, candidate: Candidate) -> int:
    rank = policy.rank(candidate.kernel.op, candidate.kernel.name)
    return len(policy.pinned(candidate.kernel.op)) if rank is None else rank


def _cheaper(a: _Cost, b: _Cost) -> bool:
    return a[0] < b[0] or (a[0] == b[0] and a[1] < b[1] * (1 - 1e-9))


def _score(candidate: Candidate) -> float:
    """Microseconds if known; before any measurement, a substitute that decreases with declared priority."""
    if candidate.expected_us is not None:
        return candidate.expected_us
    return 1e6 - candidate.kernel.priority
