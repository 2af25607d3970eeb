"""Resolution: select, verify the winner if it has no record, write the record, select again. Never times anything."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence

from gristmill.autotune.device import device_target
from gristmill.autotune.store import save
from gristmill.autotune.worker import Worker, shared_worker
from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.plan import Plan, bucket_sizes, make_plan
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import Registry, default_registry
from gristmill.kernel_registry.select import Candidate, Selection, select
from gristmill.kernel_registry.store import Store, StoreError, Verification, config_key, target_key
from gristmill.kernel_registry.target import Target


class Resolver:
    """Selection on one device of this machine, under one policy, with the store behind it."""

    def __init__(
        self,
        device: str,
        policy: Policy | None = None,
        registry: Registry | None = None,
        build: Build | None = None,
        worker: Worker | None = None,
    ) -> None:
        self.device = device
        self.policy = policy or Policy.current()
        self.registry = registry or default_registry()
        self.target: Target = device_target(device, self.policy)
        self.build = build or confirmed_build(self.registry, self.target, self.policy)
        self.worker = worker or shared_worker()
        self.store = self._read()
        self._lock = threading.Lock()

    def select(self, op: Op, problem: Problem, layouts: frozenset[str] | None = None) -> Selection:
        """Selection as the records stand: verifies nothing."""
        return select(
            op, problem, self.registry.kernels_of(op.name), self.target, self.build, self.store, self.policy,
            layouts=layouts,
        )  # fmt: skip

    def resolve(self, op: Op, problem: Problem, layouts: frozenset[str] | None = None) -> Selection:
        """A selection whose best has matched the reference here; failures on the way are quarantined, with warning."""
        with self._lock:
            while True:
                selection = self.select(op, problem, layouts)
                if selection.best is None or selection.best.verdict == "selected":
                    return selection
                record = self.verify(op, problem, selection.best)
                if not record.ok:
                    warnings.warn(f"{record.kernel} is quarantined on {self.target.name} for {op.name} {problem}: "
                                  f"{record.reason}", RuntimeWarning, stacklevel=2)  # fmt: skip

    def verify(self, op: Op, problem: Problem, candidate: Candidate) -> Verification:
        """Verify one candidate, in a child process, and write the record.

        A "trying" record is written before the launch: if the machine dies with it, the kernel stays quarantined.
        """
        kernel, config = candidate.kernel, candidate.config or {}
        small = op.verification(problem)

        def record(ok: bool, error: float | None, reason: str) -> Verification:
            return Verification(
                op=op.name, kernel=kernel.name, code=kernel.code_hash(), config=config_key(config), problem=str(small),
                target=target_key(self.target), toolchain=self.build.key(), ok=ok, error=error, reason=reason,
            )  # fmt: skip

        trying = record(False, None, "trying: the process ended before the verification did")
        if self.target.vendor != "cpu":
            self._write([trying])
        try:
            outcome = self.worker.verify(op, kernel, config, small, self.device)
        except BaseException:  # the user's interrupt, most likely: it says nothing of the kernel
            self.store.verifications.pop(trying.key, None)
            self._write([], forget=[trying])
            raise
        done = record(outcome["ok"], outcome["error"], outcome["reason"])
        self._write([done])
        return done

    def plan(self, op: Op, static: Problem, sizes: Sequence[int] | None = None) -> Plan:
        """The plan of a layer: every bucket resolved."""
        return make_plan(
            op, static, self.registry.layouts, self.policy, lambda problem, layouts: self.resolve(op, problem, layouts),
            sizes=sizes or bucket_sizes(), peek=lambda problem, layouts: self.select(op, problem, layouts),
        )  # fmt: skip

    def kernel(self, op: Op, name: str) -> Kernel:
        """A kernel of this resolver's registry."""
        return self.registry.kernel(op.name, name)

    def _read(self) -> Store:
        try:
            return Store.read_over_shipped(self.policy.store_path)
        except StoreError as error:
            warnings.warn(f"{error}; going on with an empty store, nothing will be recorded", RuntimeWarning, stacklevel=2)
            return Store()

    def _write(self, records: list[Verification], forget: Sequence[Verification] = ()) -> None:
        for record in records:
            self.store.add(record)
        try:
            save(self.policy.store_path, records, forget)
        except (OSError, StoreError) as error:
            warnings.warn(f"cannot write the store: {error}", RuntimeWarning, stacklevel=2)


def confirmed_build(registry: Registry, target: Target, policy: Policy | None = None) -> Build:
    """This installation, asked what the modules that wrapped kernels need really offer.

    Sources are read, not run; a module whose source does not tell is imported if `policy` pins a kernel that needs it.
    """
    vendor = target.vendor
    kernels = [k for k in registry.all_kernels() if not k.requires.vendors or vendor in k.requires.vendors]
    build = Build.probe().confirm([offer for kernel in kernels for offer in kernel.requires.offers])
    pinned = [k for k in kernels if policy is not None and policy.rank(k.op, k.name) is not None]
    ready = [k for k in pinned if not any(build.why_not_package(*package) for package in k.requires.packages)]
    return build.confirm([offer for kernel in ready for offer in kernel.requires.offers], importing=True)
