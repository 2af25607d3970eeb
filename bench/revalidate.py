"""Check whether times of another toolchain are still valid: a sample of them is verified and timed again.

The records of a kernel are judged together. If nearly all of its sample agrees with the store, its other records are carried
over: they count as measured with the present toolchain, and say so. Otherwise they remain near times. A configuration that
gives a wrong result is recorded as failed, which excludes it.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gristmill.autotune.errors import UnverifiableError
from gristmill.autotune.place import Place
from gristmill.autotune.rounds import REPEATS
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store, Timing, Verification, config_key, target_key
from gristmill.kernel_registry.times import of_present_code

HOLDS, DIFFERS, WRONG = "holds", "differs", "wrong"

WITHIN = 0.1
"""The largest relative difference from the recorded time that still holds. Old and new times were not taken in turn."""

OUTSIDE = 10
"""One in this many records of a sample may differ by more."""

ROUNDS = 8


@dataclass(frozen=True)
class Remeasured:
    """One record, measured again; `us` is None if the result is wrong now, and `reason` says why."""

    record: Timing
    us: float | None
    samples: tuple[float, ...] = ()
    error: float | None = None
    reason: str = ""

    @property
    def ratio(self) -> float | None:
        """Now over then."""
        return None if self.us is None else self.us / self.record.us


@dataclass
class Group:
    """The records of one kernel from another toolchain, judged by those in `again`."""

    op: str
    kernel: str
    records: list[Timing]
    again: list[Remeasured] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        """WRONG if any record is; HOLDS if at most one in OUTSIDE differs by more than WITHIN."""
        if any(one.us is None for one in self.again):
            return WRONG
        if not self.again:
            return DIFFERS  # no evidence for the records
        off = sum(abs(one.ratio - 1) > WITHIN for one in self.again if one.ratio is not None)
        return HOLDS if off <= len(self.again) // OUTSIDE else DIFFERS

    def as_dict(self) -> dict[str, Any]:
        """The row of JSON."""
        ratios = [one.ratio for one in self.again if one.ratio is not None]
        return {
            "op": self.op,
            "kernel": self.kernel,
            "outcome": self.outcome,
            "records": len(self.records),
            "sampled": len(self.again),
            "ratio": statistics.median(ratios) if ratios else None,
            "least": min(ratios, default=None),
            "most": max(ratios, default=None),
            "reasons": [*(one.reason for one in self.again if one.reason), *self.untried],
        }


def groups(store: Store, here: Place) -> list[Group]:
    """Times of this device with the present code and another toolchain, for problems without a time of the present toolchain."""
    grouped: dict[tuple[str, str], Group] = {}
    registry = default_registry()
    own, tools = target_key(here.target), here.build.key()
    known = {
        (t.op, t.kernel, t.problem, config_key(t.config), t.timing)
        for t in store.timings
        if t.target == own and t.toolchain == tools
    }
    for timing in store.timings:
        kernel = next((k for k in registry.kernels.get(timing.op, ()) if k.name == timing.kernel), None)
        if (
            kernel is None
            or timing.target != own
            or timing.toolchain == tools
            or not of_present_code(kernel, timing)
        ):
            continue
        if timing.toolchain.endswith(",interpreter") != here.build.triton_interpreter:
            continue  # times of interpreted and compiled kernels are not comparable
        if (timing.op, timing.kernel, timing.problem, config_key(timing.config), timing.timing) in known:
            continue
        problem = store.problem(registry.op(timing.op), timing.problem)
        if problem is not None and not here.why_not(kernel, problem):
            grouped.setdefault(
                (timing.op, timing.kernel), Group(timing.op, timing.kernel, [])
            ).records.append(timing)
    return [grouped[key] for key in sorted(grouped)]


def revalidate(
    groups_to_measure: Sequence[Group],
    here: Place,
    *,
    sample: int = 8,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
    measure: Callable[[Timing, Place], Remeasured] | None = None,
) -> list[Verification | Timing]:
    """Measure a sample of every group again, and return the new records: those of the sample and, if it holds, those that
    are carried over."""
    records: list[Verification | Timing] = []
    rng = random.Random(seed)
    for number, group in enumerate(groups_to_measure):
        for timing in rng.sample(group.records, min(sample, len(group.records))):
            progress(f"{number + 1}/{len(groups_to_measure)} {group.kernel} {timing.problem}")
            try:
                group.again.append((measure or _remeasure)(timing, here))
            except (
                UnverifiableError
            ) as error:  # too little memory, for example: no evidence for or against the record
                group.untried.append(str(error))
        records += [record for one in group.again for record in _records(one, here)]
        if group.outcome != HOLDS:
            continue
        sampled = {one.record.key for one in group.again}
        for timing in group.records:
            if timing.key not in sampled:
                origin = f"{len(group.again)} of {len(group.records)} held within {WITHIN:.0%}; measured with {timing.toolchain}"
                records.append(replace(timing, toolchain=here.build.key(), origin=origin))
    return records


def replaced(store: Store, records: Sequence[Verification | Timing]) -> Store:
    """`store` with `records`, without the times of other toolchains that they replace."""
    new = {_place(record) for record in records if isinstance(record, Timing)}
    made = Store()
    for record in (
        *store.verifications.values(),
        *(t for t in store.timings if _place(t) not in new),
        *records,
    ):
        made.add(record)
    return made


def _place(timing: Timing) -> tuple[str, ...]:
    """A time's key without its toolchain."""
    return tuple(value for name, value in zip(_KEY, timing.key, strict=True) if name != "toolchain")


_KEY = ("op", "kernel", "config", "problem", "target", "toolchain", "timing")


def _remeasure(timing: Timing, here: Place) -> Remeasured:
    from gristmill.autotune.candidate import Candidate, TimingMode, WrongResultError, shared_rotations
    from gristmill.bench.compare import verified

    op, kernel, problem = _named(timing)
    device = here.device or "cpu"
    if wrong := verified(op, kernel, timing.config, problem, device):
        return Remeasured(timing, None, reason=wrong)
    try:
        mode = TimingMode.parse(timing.timing)
        rotation = shared_rotations(op, problem, device, [kernel], hot=mode.hot)[kernel.name]
        candidate = Candidate(kernel, timing.config, rotation, eager=mode.eager, isolated=mode.isolated)
        samples = tuple(min(candidate.sample() for _ in range(REPEATS)) for _ in range(ROUNDS))
        candidate.conclude()
    except WrongResultError as error:
        return Remeasured(timing, None, reason=str(error))
    return Remeasured(timing, statistics.median(samples), samples, candidate.error)


def _records(one: Remeasured, here: Place) -> list[Verification | Timing]:
    timing = one.record
    op, kernel, problem = _named(timing)
    where = {"target": timing.target, "toolchain": here.build.key()}
    outcome = Verification(
        op=op.name,
        kernel=kernel.name,
        code=kernel.verification_hash(timing.config),
        config=config_key(timing.config),
        problem=str(op.verification(problem, kernel, timing.config)),
        ok=one.us is not None,
        error=one.error,
        reason=one.reason,
        **where,
    )
    if one.us is None:
        return [outcome]
    fields = (
        asdict(timing)
        | where
        | {
            "code": kernel.code_hash(timing.config, built=True),
            "config": dict(timing.config),
            "us": one.us,
            "samples": one.samples,
            "origin": "",
        }
    )
    return [outcome, Timing(**fields)]


def _named(timing: Timing) -> tuple[Op, Kernel, Problem]:
    op = default_registry().op(timing.op)
    return op, default_registry().kernel(op.name, timing.kernel), op.problem(timing.problem)
