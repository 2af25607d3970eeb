"""Resolution: select, verify the winner if it has no record, write the record, select again. Never times anything."""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from operator import is_
from pathlib import Path
from typing import Any, Protocol

from gristmill.autotune.compilations import keep_below
from gristmill.autotune.device import device_target
from gristmill.autotune.errors import UnpreparedError, UnverifiableError
from gristmill.autotune.mark import Mark
from gristmill.autotune.store import present, save, state_of
from gristmill.autotune.worker import Worker, Workers, shared_workers
from gristmill.autotune.worker_group import WorkerGroup, close_shared_groups, shared_group
from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.plan import Plan, bucket_sizes, make_plan, readable
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import Registry, default_registry
from gristmill.kernel_registry.select import Candidate, Fitting, Selection, select
from gristmill.kernel_registry.store import Store, StoreError, Verification, config_key, target_key
from gristmill.kernel_registry.target import Target

Task = tuple[Op, Problem, frozenset[str] | None]
"""What is to be resolved: an operation, a problem, and the layouts that its weights are packed in."""


Basis = tuple[Fitting, Target, Build, Store, Policy]
MOST_KEPT = 4096
"""Selections that a resolver keeps."""


class Chooser(Protocol):
    """Another process that chooses for this one: all ranks of a model run what one of them chose."""

    def choose(self, op: Op, problem: Problem, layouts: frozenset[str] | None) -> Candidate:
        """The kernel for a problem, verified; NoKernelError if there is none."""
        ...

    def plan(self, op: Op, static: Problem, sizes: Sequence[int] | None, without: Collection[str]) -> Plan:
        """The plan of a layer, as `Resolver.plan`."""
        ...

    def layouts(self, problem: Problem, without: frozenset[str]) -> frozenset[str]:
        """The layouts of the weights of a static problem, as `plan_layouts`."""
        ...

    def resolve_all(self, tasks: Sequence[Task], workers: int) -> None:
        """Verify what `choose` is going to be asked for, as `Resolver.resolve_all`."""
        ...


class Resolver:
    """Selection on one device of this machine, under one policy, with the store behind it; a `chooser` chooses in its place."""

    def __init__(
        self,
        device: str,
        policy: Policy | None = None,
        registry: Registry | None = None,
        build: Build | None = None,
        worker: Worker | None = None,
        target: Target | None = None,
    ) -> None:
        self.device = device
        self.policy = policy or Policy.current()
        self.registry = registry or default_registry()
        for wrong in self.policy.unmatched(self.registry):
            warnings.warn(wrong, RuntimeWarning, stacklevel=2)
        self.target: Target = target or device_target(device, self.policy)
        if self.target.vendor != "cpu":
            keep_below(self.policy)
        self.build = build or confirmed_build(self.registry, self.target, self.policy)
        self.workers = shared_workers() if worker is None else Workers(worker)
        self.chooser: Chooser | None = None
        self.chosen_layouts: dict[tuple[Problem, frozenset[str]], frozenset[str]] = {}
        self.tried = 0
        """Candidates that were verified for this resolver."""
        self._fitting: dict[str, tuple[tuple[Kernel, ...], Fitting]] = {}
        self._selected: dict[tuple[Any, ...], tuple[int, Basis, Selection]] = {}
        self._recording = True
        self._seen = state_of(self.policy.store_path)
        self.store = self._read()
        self._changed = threading.Condition()  # guards the store and `_trials`
        self._trials: set[tuple[str, ...]] = set()  # keys of records that threads are making
        path = self.policy.store_path
        self._mark = Mark(path.with_name(path.name + ".trying"))
        self._writer = _Writer(path)

    def select(self, op: Op, problem: Problem, layouts: frozenset[str] | None = None) -> Selection:
        """Selection as the records stand: verifies nothing."""
        kept = self._kept(op, problem, layouts)
        if kept is not None:
            return kept
        changes, basis = self.store.changes[op.name], self._basis(op)
        fitting, target, build, store, policy = basis
        selection = select(op, problem, fitting, target, build, store, policy, layouts=layouts)
        if len(self._selected) >= MOST_KEPT:
            self._selected.clear()
        self._selected[op.name, problem, layouts] = changes, basis, selection
        return selection

    def _kept(self, op: Op, problem: Problem, layouts: frozenset[str] | None) -> Selection | None:
        """The selection that was made before, which a load asks for several times; None if there is none, or if something that it follows from has
        changed since."""
        kept = self._selected.get((op.name, problem, layouts))
        if kept is None or kept[0] != self.store.changes[op.name]:
            return None
        return kept[2] if all(map(is_, kept[1], self._basis(op))) else None

    def _basis(self, op: Op) -> Basis:
        """What selections for an operation follow from, beside its records."""
        return self.fitting(op), self.target, self.build, self.store, self.policy

    def fitting(self, op: Op) -> Fitting:
        """What is left of the operation's kernels on this device with this installation, as the registry stands."""
        kernels = self.registry.kernels_of(op.name)
        known = self._fitting.get(op.name)
        if known is None or known[0] != kernels:
            known = self._fitting[op.name] = kernels, Fitting.of(op, kernels, self.target, self.build)
        return known[1]

    def resolve(self, op: Op, problem: Problem, layouts: frozenset[str] | None = None) -> Selection:
        """A selection whose best has matched the reference here; failures on the way are quarantined, with warning."""
        if self.chooser is not None:
            best = self.chooser.choose(op, problem, layouts)
            return Selection(op.name, problem, self.target, (best,), best)
        while True:
            selection = self._kept(op, problem, layouts)  # without waiting for threads that select
            if selection is None:
                with self._changed:
                    selection = self.select(op, problem, layouts)
            if selection.best is None or selection.best.verdict == "selected":
                return selection
            record = self.verify(op, problem, selection.best)
            if not record.ok:
                warnings.warn(
                    f"{record.kernel} is quarantined on {self.target.name} for {op.name} {problem}: {record.reason}",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def resolve_all(
        self,
        problems: Sequence[Task],
        workers: int,
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        """Resolve problems with `workers` verifications at a time; records are the result. `progress` gets the number that are done.

        What cannot be verified beside others, for example for want of memory, is left for `resolve` alone.
        """

        if self.chooser is not None:
            self.chooser.resolve_all(problems, workers)
            progress(len(problems))
            return

        def resolve(task: Task) -> None:
            with suppress(UnverifiableError):
                self.resolve(*task)

        with self.several(workers) as allowed, ThreadPoolExecutor(allowed) as pool:
            for done, future in enumerate(as_completed([pool.submit(resolve, task) for task in problems]), 1):
                future.result()
                progress(done)

    @contextmanager
    def several(self, workers: int) -> Iterator[int]:
        """Let threads of this process verify in so many child processes at a time; yields how many it may be."""
        if workers > 1 and self._died_together():
            workers = 1
        try:
            with self.workers.allow(workers):
                yield workers
        finally:
            if not self.workers.allowed:
                close_shared_groups()

    def verified(self, op: Op, problem: Problem, layouts: frozenset[str] | None = None) -> Selection:
        """A selection whose best has matched the reference here already: verifies nothing.

        Raises:
            UnpreparedError: no kernel for the problem is verified.
        """
        selection = self.select(op, problem, layouts)
        best = next((c for c in selection.candidates if c.verdict in ("selected", "eligible")), None)
        if selection.best is None or selection.best is best:
            return selection
        late = f"{op.name} {problem} was not prepared before the plans were sealed"
        if best is None:
            raise UnpreparedError(
                f"{late}, and no kernel is verified for it: call gristmill.ops.prepare for its size"
            )
        warnings.warn(
            f"{late}: it runs {best.kernel.name}, which is verified; {selection.best.kernel.name} is expected to be faster",
            RuntimeWarning,
            stacklevel=2,
        )
        return replace(selection, best=best)

    def verify(self, op: Op, problem: Problem, candidate: Candidate) -> Verification:
        """Verify one candidate in a child process, on its canary if it has one, and write the record; UnverifiableError if the fault is not the
        kernel's.

        On an accelerator the trial is journaled (`gristmill.autotune.mark`): if the machine crashes, the kernel is quarantined.
        """
        kernel, config = candidate.kernel, candidate.config or {}
        small = op.problem(candidate.canary) if candidate.canary else op.verification(problem, kernel, config)

        def record(ok: bool, error: float | None, reason: str) -> Verification:
            return Verification(
                op=op.name,
                kernel=kernel.name,
                code=kernel.verification_hash(config),
                config=config_key(config),
                problem=str(small),
                target=target_key(self.target),
                toolchain=self.build.key(),
                ok=ok,
                error=error,
                reason=reason,
            )

        trying = record(False, None, "trying: the process ended before the verification did")
        with self._changed:
            self._changed.wait_for(lambda: trying.key not in self._trials)  # another thread's
            if trying.key in self.store.verifications:  # made since the candidate was selected
                return self.store.verifications[trying.key]
            self._trials.add(trying.key)
        try:
            return self._try(
                trying, lambda by: by.verify(op, kernel, config, small, self.device), op.world(small)
            )
        finally:
            with self._changed:
                self._trials.remove(trying.key)
                self._changed.notify_all()

    def _try(
        self, trying: Verification, verify: Callable[[Worker | WorkerGroup], dict[str, Any]], world: int
    ) -> Verification:
        """Run a trial, by one worker or by one per rank, and return its record; or the record that another process has made meanwhile, or
        that an earlier one left when it died."""
        with self.workers.one() as worker, self._marked(trying) as left_records:
            if len(left_records) == 1:
                self._record(left_records[0])
                if left_records[0].key == trying.key:
                    return left_records[0]
            # Processes that start together need the same records, and wait here for each other.
            if (made := self._made_elsewhere(trying)) is not None:
                return made
            result = self._judged(trying, verify(worker if world == 1 else shared_group(world)))
            self._record(result)
            if self.target.vendor != "cpu":
                self._writer.flush()
                self._seen = state_of(self.policy.store_path)  # nobody else writes while the mark is held
        return result

    def _judged(self, trying: Verification, outcome: dict[str, Any]) -> Verification:
        if not outcome["judged"]:
            raise UnverifiableError(
                f"{trying.kernel} cannot be verified on {self.device}, and was not recorded: {outcome['reason']}"
            )
        self.tried += 1
        return replace(trying, ok=outcome["ok"], error=outcome["error"], reason=outcome["reason"])

    def _made_elsewhere(self, trying: Verification) -> Verification | None:
        """The record of a trial, if another process has written it since this one read the store; with it all others that are new."""
        state = state_of(self.policy.store_path)
        with self._changed:
            if not self._recording or state == self._seen:
                return None
            self._seen = state
            known = self.store.verifications
            new = {
                key: record for key, record in self._read(present).verifications.items() if key not in known
            }
            for record in new.values():
                self.store.add(record)
        return new.get(trying.key)

    def flush(self) -> None:
        """Write the records that wait: what is killed does not."""
        self._writer.flush()

    def plan(
        self, op: Op, static: Problem, sizes: Sequence[int] | None = None, without: Collection[str] = ()
    ) -> Plan:
        """The plan of a layer, every bucket resolved; layouts in `without` cannot hold its weight."""
        if self.chooser is not None:
            return self.chooser.plan(op, static, sizes, without)
        layouts = readable(self.fitting(op).kernels, self.registry.layouts, self.target, self.build, without)
        return make_plan(
            op,
            static,
            layouts,
            self.policy,
            lambda problem, layouts: self.resolve(op, problem, layouts),
            sizes=sizes or bucket_sizes(),
            peek=lambda problem, layouts: self.select(op, problem, layouts),
        )

    def kernel(self, op: Op, name: str) -> Kernel:
        """A kernel of this resolver's registry."""
        return self.registry.kernel(op.name, name)

    def _read(self, read: Callable[[Path], Store] = Store.read_over_shipped) -> Store:
        """The store, as `read` reads its file; an empty one, with a warning, if that is damaged."""
        try:
            return read(self.policy.store_path)
        except StoreError as error:
            warnings.warn(
                f"{error}; going on with an empty store, nothing will be recorded",
                RuntimeWarning,
                stacklevel=2,
            )
            self._recording = False
            return Store()

    def _marked(self, trying: Verification) -> AbstractContextManager[tuple[Verification, ...]]:
        """The mark of a trial, on devices where a fault can crash the machine; yields the records of a process that died."""
        if self.target.vendor == "cpu" or not _can_write(self._mark.path.parent):
            return nullcontext(())
        return self._mark.trial(trying, 2 * self.workers.first.timeout)

    def _died_together(self) -> bool:
        """Whether a process died during several trials: any of their kernels may have crashed the machine, so none is judged."""
        if self.target.vendor == "cpu" or not _can_write(self._mark.path.parent):
            return False
        left_records = self._mark.left()
        if len(left_records) == 1:
            self._record(left_records[0])
        elif left_records:
            warnings.warn(
                f"a process ended while it verified {len(left_records)} kernels at a time: kernels are verified one by one",
                RuntimeWarning,
                stacklevel=3,
            )
        return len(left_records) > 1

    def _record(self, record: Verification) -> None:
        with self._changed:
            self.store.add(record)
            if self._recording:
                self._writer.add(record)


class _Writer:
    """A buffer of records for the store's file. Each write rewrites the file, so writes are limited to a twentieth of the time.

    A failure is written immediately. Buffered records are written with the next one, or when the process ends; a process that
    is killed loses only verifications, which can be repeated.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: list[Verification] = []
        self.due = 0.0
        self._saving = threading.Lock()
        weakref.finalize(self, _save, path, self.waiting, self._saving)

    def flush(self) -> None:
        """Write what waits."""
        _save(self.path, self.waiting, self._saving)

    def add(self, record: Verification) -> None:
        self.waiting.append(record)
        begin = time.monotonic()
        if begin >= self.due or not record.ok:
            _save(self.path, self.waiting, self._saving)
            end = time.monotonic()
            self.due = end + 20 * (end - begin)


def _save(path: Path, waiting: list[Verification], saving: threading.Lock) -> None:
    """Write the records that wait now. Other threads may add some meanwhile, which wait for the next time."""
    with saving:
        records = waiting[:]
        if not records:
            return
        try:
            save(path, records)
        except (OSError, StoreError) as error:
            warnings.warn(f"cannot write the store: {error}", RuntimeWarning, stacklevel=2)
        del waiting[: len(records)]


def _can_write(folder: Path) -> bool:
    """Whether marks can be made there; where not, the store cannot be written either, which is warned of."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def confirmed_build(registry: Registry, target: Target, policy: Policy | None = None) -> Build:
    """This installation, with the offers of the modules that wrapped kernels need.

    Sources are read, not run; a module whose source is inconclusive is imported if `policy` pins a kernel that needs it.
    """
    vendor = target.vendor
    kernels = [k for k in registry.all_kernels() if not k.requires.vendors or vendor in k.requires.vendors]
    build = Build.probe().confirm([offer for kernel in kernels for offer in kernel.requires.offers])
    return imported_build(
        build, [k for k in kernels if policy is not None and policy.rank(k.op, k.name) is not None]
    )


def imported_build(build: Build, kernels: Sequence[Kernel]) -> Build:
    """`build` once the modules that `kernels` need were imported, of installed packages, if their source is
    inconclusive."""
    ready = [
        k for k in kernels if not any(build.why_not_package(*package) for package in k.requires.packages)
    ]
    return build.confirm([offer for kernel in ready for offer in kernel.requires.offers], importing=True)
