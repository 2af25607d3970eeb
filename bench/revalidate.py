"""Do times that were measured with another toolchain still hold? A sample of them is verified and timed again.

Records of one kernel stand or fall together. Where nearly all of its sample took as long as the store says, the rest are
carried over: they count as measured with the present toolchain, and say so. Where not, the rest stay what another
toolchain's times are, near ones. A configuration that no longer gives right results is recorded as failed, which keeps it out.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gristmill.autotune.errors import UnverifiableError
from gristmill.autotune.place import Place
from gristmill.bench.compare import why_not
from gristmill.bench.statistics.rounds import REPEATS
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store, Timing, Verification, config_key, target_key
from gristmill.kernel_registry.times import of_present_code

HOLDS, DIFFERS, WRONG = "holds", "differs", "wrong"

WITHIN = 0.1
"""How far a time may be from the recorded one and still hold: then and now were not timed in turn."""

OUTSIDE = 10
"""One in so many of a sample may be off by more."""

ROUNDS = 8


@dataclass(frozen=True)
class Again:
    """One record, measured again. us: None if it is wrong now, and `reason` says why."""

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
    """The records of one kernel that another toolchain measured. outcome: HOLDS, DIFFERS or WRONG, of `again`."""

    op: str
    kernel: str
    records: list[Timing]
    again: list[Again] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        """WRONG if any is; HOLDS if at most one in OUTSIDE is further off than WITHIN."""
        if any(one.us is None for one in self.again):
            return WRONG
        if not self.again:
            return DIFFERS  # nothing speaks for the records
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
    """The times of this device by the present code and another toolchain, of problems that the present one has no time of."""
    found: dict[tuple[str, str], Group] = {}
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
            continue  # interpreted kernels and compiled ones say nothing of each other
        if (timing.op, timing.kernel, timing.problem, config_key(timing.config), timing.timing) in known:
            continue
        problem = store.problem(registry.op(timing.op), timing.problem)
        if problem is not None and not why_not(kernel, problem, here):
            found.setdefault((timing.op, timing.kernel), Group(timing.op, timing.kernel, [])).records.append(
                timing
            )
    return [found[key] for key in sorted(found)]


def revalidate(
    found: Sequence[Group],
    here: Place,
    *,
    sample: int = 8,
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
    measure: Callable[[Timing, Place], Again] | None = None,
) -> list[Verification | Timing]:
    """Measure a sample of every group again, and return the records that this makes: those of the sample, and, where it
    holds, those that are carried over."""
    records: list[Verification | Timing] = []
    chance = random.Random(seed)
    for number, group in enumerate(found):
        for timing in chance.sample(group.records, min(sample, len(group.records))):
            tell(f"{number + 1}/{len(found)} {group.kernel} {timing.problem}")
            try:
                group.again.append((measure or _again)(timing, here))
            except (
                UnverifiableError
            ) as error:  # too little memory, say: it speaks neither for the record nor against it
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
    """`store` with `records`, and without the times of other toolchains that they stand for."""
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


def _again(timing: Timing, here: Place) -> Again:
    from gristmill.bench.arms import KernelArm, TimingMode, WrongResultError, shared_rotations
    from gristmill.bench.compare import verified

    op, kernel, problem = _named(timing)
    device = here.device or "cpu"
    if wrong := verified(op, kernel, timing.config, problem, device):
        return Again(timing, None, reason=wrong)
    try:
        mode = TimingMode.parse(timing.timing)
        rotation = shared_rotations(op, problem, device, [kernel], hot=mode.hot)[kernel.name]
        arm = KernelArm(kernel, timing.config, rotation, eager=mode.eager, isolated=mode.isolated)
        samples = tuple(min(arm.sample() for _ in range(REPEATS)) for _ in range(ROUNDS))
        arm.conclude()
    except WrongResultError as error:
        return Again(timing, None, reason=str(error))
    return Again(timing, statistics.median(samples), samples, arm.error)


def _records(one: Again, here: Place) -> list[Verification | Timing]:
    timing = one.record
    op, kernel, problem = _named(timing)
    where = {"target": timing.target, "toolchain": here.build.key()}
    outcome = Verification(
        op=op.name,
        kernel=kernel.name,
        code=kernel.verification_hash(timing.config),
        config=config_key(timing.config),
        problem=str(op.verification(problem)),
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
