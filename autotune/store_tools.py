"""Maintenance of stores: merge several, compare two, find records without effect."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import AxisError
from gristmill.kernel_registry.registry import Registry
from gristmill.kernel_registry.store import Store, Timing, Verification, config_key, config_of
from gristmill.kernel_registry.target import Target
from gristmill.kernel_registry.times import of_present_code as time_of_present_code

Record = Verification | Timing


def records(store: Store) -> list[Record]:
    """Every record of a store."""
    return [*store.verifications.values(), *store.timings]


def better(record: Record, other: Record) -> Record:
    """Which of two records of the same key a merge keeps: the failed verification, the time with more samples."""
    if isinstance(record, Verification) and isinstance(other, Verification):
        return other if record.ok and not other.ok else record
    if isinstance(record, Timing) and isinstance(other, Timing):
        return other if len(other.samples) > len(record.samples) else record
    raise TypeError("a verification and a time have no key in common")


def merge(stores: Iterable[Store]) -> Store:
    """One store with every record of all; where two have the same key, the `better` one."""
    by_key: dict[tuple[str, ...], Record] = {}
    for store in stores:
        for record in records(store):
            key = (type(record).__name__, *record.key)
            by_key[key] = better(by_key[key], record) if key in by_key else record
    merged = Store()
    for record in by_key.values():
        merged.add(record)
    return merged


@dataclass(frozen=True)
class Difference:
    """The records of two stores for one key; None = absent."""

    before: Record | None
    after: Record | None

    @property
    def kind(self) -> str:
        """``added``, ``removed`` or ``changed``."""
        return "added" if self.before is None else "removed" if self.after is None else "changed"

    @property
    def what(self) -> str:
        """What changed, in words."""
        if isinstance(self.before, Timing) and isinstance(self.after, Timing):
            return f"{self.before.us:.3g} us, then {self.after.us:.3g} us ({self.after.us / self.before.us - 1:+.1%})"
        present = self.after or self.before
        if isinstance(present, Timing):
            return f"{present.us:.3g} us"
        texts = [_outcome(v) for v in (self.before, self.after) if isinstance(v, Verification)]
        return ", then ".join(texts)


def diff(before: Store, after: Store) -> list[Difference]:
    """Records that only one store has, and those whose time or outcome differs."""
    old, new = ({(type(r).__name__, *r.key): r for r in records(store)} for store in (before, after))
    return [
        Difference(old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


@dataclass(frozen=True)
class Finding:
    """A finding about one record: ``never`` (no lookup returns it), ``stale`` (other code or toolchain),
    ``slower`` (a tuned configuration that is slower than the default one), ``failed`` (it keeps a kernel out)."""

    kind: str
    record: Record
    reason: str


def lint(store: Store, registry: Registry, target: Target, own: str, build: Build) -> list[Finding]:
    """Records without effect or with a problem. Only those of this device, whose `target_key` is `own`, can be stale."""
    findings = []
    for record in records(store):
        if reason := _never(record, registry):
            findings.append(Finding("never", record, reason))
            continue
        kernel = registry.kernel(record.op, record.kernel)
        if not _of_present_code(kernel, record):
            findings.append(Finding("stale", record, "the kernel's code has changed since"))
        elif record.target == own and record.toolchain != build.key():
            findings.append(
                Finding("stale", record, f"made with {record.toolchain}; this installation is {build.key()}")
            )
        elif isinstance(record, Verification) and not record.ok:
            findings.append(Finding("failed", record, record.reason or "did not match the reference"))
        elif (
            isinstance(record, Timing)
            and record.target == own
            and (reason := _slower(record, store, registry, target))
        ):
            findings.append(Finding("slower", record, reason))
    return findings


def of_present_code(registry: Registry, record: Record) -> bool:
    """Whether a record was made with the code that its kernel has now; not if there is no such kernel."""
    kernel = _kernel(registry, record)
    return kernel is not None and _of_present_code(kernel, record)


def _of_present_code(kernel: Kernel, record: Record) -> bool:
    if isinstance(record, Timing):
        return time_of_present_code(kernel, record)
    return record.code == kernel.verification_hash(config_of(record.config))


def _never(record: Record, registry: Registry) -> str:
    op, kernel = registry.ops.get(record.op), _kernel(registry, record)
    if op is None:
        return f"there is no operation {record.op}"
    if kernel is None:
        return f"{record.op} has no kernel {record.kernel}"
    try:
        problem = op.problem(record.problem)
    except AxisError as error:
        return str(error)
    if problem.open_axes:
        return f"leaves {', '.join(problem.open_axes)} open"
    if str(problem) != record.problem:
        return f"the problem is written {problem}"
    if reason := kernel.accepts(problem):
        return f"{kernel.name} no longer takes it: {reason}"
    if isinstance(record, Verification) and _of_present_code(kernel, record):
        small = op.verification(problem, kernel, config_of(record.config))
        if str(small) != record.problem:
            return f"verification looks for {small} instead"
    try:
        Target.parse(record.target.partition("|")[0])
    except ValueError as error:
        return str(error)
    return ""


def _kernel(registry: Registry, record: Record) -> Kernel | None:
    return next((k for k in registry.kernels.get(record.op, ()) if k.name == record.kernel), None)


def _slower(record: Timing, store: Store, registry: Registry, target: Target) -> str:
    op: Op = registry.op(record.op)
    kernel = registry.kernel(record.op, record.kernel)
    default = config_key(kernel.config(op.problem(record.problem), target))
    if config_key(record.config) == default:
        return ""
    for default_record in store.times(record.op, record.target):
        if (
            default_record.kernel == record.kernel
            and default_record.problem == record.problem
            and default_record.toolchain == record.toolchain
            and default_record.timing == record.timing
            and config_key(default_record.config) == default
            and default_record.us < record.us
        ):
            return f"{record.us:.3g} us; the default configuration takes {default_record.us:.3g} us"
    return ""


def _outcome(record: Verification) -> str:
    return "matched" if record.ok else f"failed: {record.reason}"
