"""Selection: which kernel runs a problem, and why not the others. A pure function of data.

Candidates pass four checks, hardware, build, problem and verified, and the constraints of the policy; docs/selection.md lists verdicts and
sources of times. The rank of a kernel depends on its own records only, so an additional candidate never reorders two others. The distance
to a tuned problem is the sum over static sizes plus the largest of the dynamic ones. Shipped times have an empty code hash: they
apply to the present code of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.grades import Proof, best, proofs
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.plugins import PluginKernelError
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.shipped import Elsewhere, shipped_verifications
from gristmill.kernel_registry.store import Store, Verification, config_key, target_key
from gristmill.kernel_registry.target import Target
from gristmill.kernel_registry.times import Times

VERDICTS = ("selected", "eligible", "unverified", "hardware", "build", "problem", "policy", "quarantined")


class NoKernelError(LookupError):
    """No kernel can run a problem under a policy. The message lists every candidate with its reason."""


@dataclass(frozen=True)
class Candidate:
    """One kernel's place in a selection.

    Attributes:
        canary: of an ``unverified`` kernel with a shipped verification, the problem to verify here first, as text.
        grade: the grade of proof by which it may run.
    """

    kernel: Kernel
    verdict: str
    reasons: tuple[str, ...] = ()
    expected_us: float | None = None
    source: str | None = None
    config: Config | None = None
    canary: str = ""
    grade: str = "here"

    def as_dict(self) -> dict[str, object]:
        """The row that `explain --json` prints."""
        return {
            "kernel": self.kernel.name,
            "verdict": self.verdict,
            "reasons": list(self.reasons),
            "expected_us": self.expected_us,
            "source": self.source,
        }


@dataclass(frozen=True)
class Selection:
    """The outcome for one problem: `candidates` best first, and `best`, the one to run (None = nothing can)."""

    op: str
    problem: Problem
    target: Target
    candidates: tuple[Candidate, ...]
    best: Candidate | None

    def require(self) -> Candidate:
        """`best`, or NoKernelError with every candidate's reason."""
        if self.best is not None:
            return self.best
        rows = "\n".join(f"  {c.kernel.name}: {c.verdict}: {'; '.join(c.reasons)}" for c in self.candidates)
        raise NoKernelError(
            f"no kernel for {self.op} {self.problem} on {self.target.name} under this policy:\n{rows or '  none registered'}"
        )


@dataclass(frozen=True)
class Fitting:
    """The kernels of one operation after the checks of hardware and build, which are the same for all problems.

    Attributes:
        kernels: those that the device and the installation can run.
        refused: the others, with the reasons.
        compiled: the device as configurations of C++ kernels see it: a CPU of the best level that was compiled for it.
    """

    kernels: tuple[Kernel, ...]
    refused: tuple[Candidate, ...]
    compiled: Target

    @staticmethod
    def of(op: Op, kernels: Sequence[Kernel], target: Target, build: Build) -> Fitting:
        """The checks of the kernels of `op`; others are left out."""
        fit, refused = [], []
        for kernel in kernels:
            if kernel.op != op.name:
                continue
            if reasons := kernel.requires.check_hardware(target, build):
                refused.append(Candidate(kernel, "hardware", tuple(reasons)))
            elif reasons := kernel.requires.check_build(target, build):
                refused.append(Candidate(kernel, "build", tuple(reasons)))
            else:
                fit.append(kernel)
        return Fitting(tuple(fit), tuple(refused), _compiled(target, build))


def select(
    op: Op,
    problem: Problem,
    kernels: Sequence[Kernel] | Fitting,
    target: Target,
    build: Build,
    store: Store,
    policy: Policy,
    *,
    layouts: frozenset[str] | None = None,
    foreign: bool = False,
) -> Selection:
    """Rank `kernels` for `problem` on `target` and pick the best. Reads no environment, no device, no file.

    The best may be ``unverified``: then the caller verifies it, records the outcome, and selects again.

    Args:
        kernels: those of `op`, or what is left of them on `target` with `build`, for callers that select often.
        layouts: only kernels that read one of these weight layouts (None = any).
        foreign: `target` is not a device here, so nothing can be verified and survivors stay ``unverified``.
    """
    fitting = kernels if isinstance(kernels, Fitting) else Fitting.of(op, kernels, target, build)
    case = _Case(op, problem, target, fitting.compiled, build, store, policy, layouts)
    judged = [*fitting.refused, *(_answered(_judge, case, kernel) for kernel in fitting.kernels)]
    alive = [c for c in judged if c.verdict in ("eligible", "unverified")]
    losers = [c for c in judged if c.verdict not in ("eligible", "unverified")]
    if policy.strict and policy.pinned(op.name):
        outside = [c for c in alive if policy.rank(op.name, c.kernel.name) is None]
        alive = [c for c in alive if policy.rank(op.name, c.kernel.name) is not None]
        losers += [
            replace(c, verdict="policy", reasons=("strict policy: not among the pinned kernels",))
            for c in outside
        ]
    alive.sort(key=lambda c: _order(c, policy))
    if foreign:
        alive = [replace(c, verdict="unverified", reasons=(_foreign(case, c.kernel),)) for c in alive]
    elif alive and alive[0].verdict == "eligible":
        alive[0] = replace(alive[0], verdict="selected")
    order = {verdict: place for place, verdict in enumerate(VERDICTS)}
    losers.sort(key=lambda c: (order[c.verdict], c.kernel.name))
    return Selection(op.name, problem, target, tuple(alive + losers), alive[0] if alive else None)


@dataclass(frozen=True)
class _Case:
    """The inputs of one selection, and what all its candidates share."""

    op: Op
    problem: Problem
    target: Target
    compiled: Target
    build: Build
    store: Store
    policy: Policy
    layouts: frozenset[str] | None

    def verification(self, kernel: Kernel, config: Config, problem: str = "") -> Verification | None:
        """The record of `kernel` with a configuration, if there is one: for the case's problem, or another one."""
        small = problem or str(self.op.verification(self.problem, kernel, config))
        key = (self.op.name, kernel.name, kernel.verification_hash(config), config_key(config), small)
        return self.store.verifications.get((*key, *self.place))

    def elsewhere(self, kernel: Kernel, config: Config) -> Elsewhere | None:
        """What a shipped verification says of `kernel` with a configuration, if the policy lets it count."""
        if not self.policy.canary:
            return None
        small = str(self.op.verification(self.problem, kernel, config))
        return shipped_verifications().find(self.op, kernel, config, small, self.place)

    @cached_property
    def place(self) -> tuple[str, str]:
        """The last two fields of the key of a verification: device, toolchain."""
        return target_key(self.target), self.build.key()

    @cached_property
    def times(self) -> Times:
        """The measured times that apply to the problem."""
        return Times(self.op, self.problem, self.target, self.build, self.store)


def able(
    op: Op,
    problem: Problem,
    kernels: Sequence[Kernel] | Fitting,
    target: Target,
    build: Build,
    policy: Policy,
    layouts: frozenset[str] | None,
) -> list[Kernel]:
    """The kernels that `select` would rank if nothing had been verified or measured, in no order. A fraction of its time."""
    fitting = kernels if isinstance(kernels, Fitting) else Fitting.of(op, kernels, target, build)
    case = _Case(op, problem, target, fitting.compiled, build, Store(), policy, layouts)
    pinned = policy.strict and policy.pinned(op.name)
    return [
        kernel
        for kernel in fitting.kernels
        if (not pinned or policy.rank(op.name, kernel.name) is not None)
        and _answered(_refused, case, kernel) is None
    ]


Judged = TypeVar("Judged", Candidate, Candidate | None)


def _answered(judge: Callable[[_Case, Kernel], Judged], case: _Case, kernel: Kernel) -> Judged:
    """`judge(case, kernel)`; a kernel of a plugin whose functions do not answer is refused."""
    try:
        return judge(case, kernel)
    except PluginKernelError as error:
        return Candidate(kernel, "problem", (str(error),))


def _refused(case: _Case, kernel: Kernel) -> Candidate | None:
    """The checks of the problem and of the native sources that it needs, and the constraints of the policy; None = passed."""
    if reason := kernel.accepts(case.problem):
        return Candidate(kernel, "problem", (reason,))
    if reason := case.build.why_not_sources(kernel.sources(case.problem)):
        return Candidate(kernel, "build", (reason,))
    if reason := _unwanted(case.op, kernel, case.target, case.policy):
        return Candidate(kernel, "policy", (reason,))
    if case.layouts is not None and kernel.layouts and not case.layouts & set(kernel.layouts):
        reads, packed_as = ", ".join(kernel.layouts), ", ".join(sorted(case.layouts))
        return Candidate(kernel, "problem", (f"reads layout {reads}; the weight is packed as {packed_as}",))
    if case.layouts is not None and not kernel.layouts and case.op.pack is not None:
        own_order = (
            "packs weights in an order of its own, which no layout names: runs in direct calls and benchmarks"
        )
        return Candidate(kernel, "problem", (own_order,))
    return None


def _judge(case: _Case, kernel: Kernel) -> Candidate:
    """The checks of a kernel that fits: problem and verified, and the constraints of the policy."""
    if (refused := _refused(case, kernel)) is not None:
        return refused
    failed: dict[str, str] = {}
    default = kernel.config(case.problem, _code_target(case, kernel))
    # A configuration that failed is out; the kernel is out when its default configuration is.
    # Tuning is per size, so under batch invariance every size runs the default configuration.
    tuned = None if case.policy.batch_invariant else case.times.config(kernel)
    for config in (tuned or default, default):
        if config_key(config) in failed:
            continue
        record = case.verification(kernel, config)
        if record is not None and not record.ok:
            failed[config_key(config)] = record.reason or "did not match the reference"
            continue
        elsewhere = None if record is not None else case.elsewhere(kernel, config)
        canary = None if elsewhere is None else case.verification(kernel, config, elsewhere.canary)
        if elsewhere is not None and canary is not None and not canary.ok:
            failed[config_key(config)] = f"canary {elsewhere.canary}: {canary.reason}"
            continue
        us, source = _expected(case, kernel, frozenset(failed))
        if elsewhere is not None:
            place = f"verified elsewhere, on another device of this model ({elsewhere.origin})"
            if canary is None:
                why = (f"{place}; its canary, {elsewhere.canary}, has no record here",)
                return Candidate(kernel, "unverified", why, us, source, config, elsewhere.canary)
            why = (f"{place}; canary passed here: {elsewhere.canary}",)
            return Candidate(kernel, "eligible", why, us, source, config, grade="elsewhere")
        if record is None and (proof := _allowed(case, kernel)) is not None:
            return Candidate(
                kernel,
                "eligible",
                (f"not verified here; by policy: {proof}",),
                us,
                source,
                config,
                grade=proof.grade,
            )
        if record is None:
            why = ("no record that it matched the reference here",)
            return Candidate(kernel, "unverified", why, us, source, config)
        return Candidate(kernel, "eligible", (), us, source, config)
    return Candidate(kernel, "quarantined", tuple(failed.values()), config=default)


def _foreign(case: _Case, kernel: Kernel) -> str:
    """Why a kernel is unverified on a device that is not here, and what is known of it there."""
    proof = best(kernel, _code_target(case, kernel))
    return "not verified: no such device here; " + (f"{proof}" if proof else "no record of another proof")


def _allowed(case: _Case, kernel: Kernel) -> Proof | None:
    """The best proof of a kernel that the policy accepts in place of a verification on this device."""
    if case.policy.grades == ("here",):  # reads no records
        return None
    return next(
        (p for p in proofs(kernel, _code_target(case, kernel)) if p.grade in case.policy.grades), None
    )


def _code_target(case: _Case, kernel: Kernel) -> Target:
    """The target as a kernel's configuration sees it."""
    return case.compiled if kernel.language == "cpp" else case.target


def _compiled(target: Target, build: Build) -> Target:
    """A CPU at the best level that was compiled for it; other devices as they are."""
    level = build.cpu_level(target) if target.vendor == "cpu" else None
    if level is None or level == target.name:
        return target
    lower = Target.parse(level)
    return replace(target, name=lower.name, arch=lower.arch, features=lower.features)


def _unwanted(op: Op, kernel: Kernel, target: Target, policy: Policy) -> str | None:
    if pattern := policy.excludes(kernel.name):
        return f"excluded by {pattern!r} in policy {policy.origin}"
    if policy.deterministic and not kernel.deterministic:
        return "not deterministic; the policy requires it"
    if policy.batch_invariant and not kernel.batch_invariant:
        return "results depend on the batch; the policy requires batch invariance"
    if kernel.language == "triton" and target.vendor == "cpu" and policy.rank(op.name, kernel.name) is None:
        return "on a CPU Triton only interprets, for tests: runs when pinned"
    if not kernel.auto and policy.rank(op.name, kernel.name) is None:
        return "runs only when pinned" + (f" ({kernel.proven})" if kernel.proven else "")
    return None


def _expected(case: _Case, kernel: Kernel, failed: frozenset[str]) -> tuple[float | None, str]:
    """Microseconds and their source: measured, near, sibling, model or (None) priority."""
    time = case.times.expected(kernel, failed)
    if time is None and kernel.estimate is not None:
        estimate = kernel.estimate(case.problem, case.target)
        time = None if estimate is None else (estimate, "model")
    return time or (None, "priority")


_SOURCES = {"measured": 0, "near": 0, "sibling": 0, "model": 1, "priority": 2}


def _order(candidate: Candidate, policy: Policy) -> tuple[float | str, ...]:
    """Pinned order, then measured time (exact, near, sibling), then estimate, then declared priority, then name.

    Under batch invariance times and estimates do not count: two kernels add in different orders, so one has to run every size.
    The key of a candidate depends only on the candidate, so that adding a kernel never swaps two others.
    """
    kernel = candidate.kernel
    pin = policy.rank(kernel.op, kernel.name)
    pinned = len(policy.pinned(kernel.op)) if pin is None else pin
    if policy.batch_invariant:
        return pinned, -kernel.priority, kernel.name
    return (
        pinned,
        _SOURCES[candidate.source or "priority"],
        candidate.expected_us or 0.0,
        -kernel.priority,
        kernel.name,
    )
