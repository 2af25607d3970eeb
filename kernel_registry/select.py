"""Selection: which kernel runs a problem, and why not the others. A pure function of data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.store import NEAR_LIMIT, Store, Timing, config_key, distance, target_key
from gristmill.kernel_registry.target import Target

VERDICTS = ("selected", "eligible", "unverified", "hardware", "build", "problem", "policy", "quarantined")


class NoKernelError(LookupError):
    """No kernel can run a problem under a policy. The message lists every candidate with its reason."""


@dataclass(frozen=True)
class Candidate:
    """One kernel's place in a selection."""

    kernel: Kernel
    verdict: str
    reasons: tuple[str, ...] = ()
    expected_us: float | None = None
    source: str | None = None
    config: Config | None = None

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


def select(
    op: Op,
    problem: Problem,
    kernels: Sequence[Kernel],
    target: Target,
    build: Build,
    store: Store,
    policy: Policy,
    *,
    layouts: frozenset[str] | None = None,
    foreign: bool = False,
) -> Selection:
    """Rank `kernels` for `problem` on `target` and pick the best.

    layouts: only kernels that read one of these weight layouts (None = any). foreign: `target` is not a device here,
    so nothing can be verified and survivors stay ``unverified``. The best may be ``unverified``: then the caller
    verifies it, records the outcome, and selects again. Reads no environment, no device, no file.
    """
    kernels = [kernel for kernel in kernels if kernel.op == op.name]
    judged = [_judge(op, problem, kernel, target, build, store, policy, layouts) for kernel in kernels]
    alive = [c for c in judged if c.verdict in ("eligible", "unverified")]
    alive = _ranked(op, problem, alive, target, store, policy)
    if policy.strict and policy.pinned(op.name):
        outside = [c for c in alive if policy.rank(op.name, c.kernel.name) is None]
        alive = [c for c in alive if c not in outside]
        judged += [replace(c, verdict="policy", reasons=("strict policy: not among the pinned kernels",)) for c in outside]
    best = alive[0] if alive else None
    if best is not None and best.verdict == "eligible" and not foreign:
        best = replace(best, verdict="selected")
        alive[0] = best
    if foreign:
        alive = [replace(c, verdict="unverified", reasons=("not verified: no such device here",)) for c in alive]
        best = alive[0] if alive else None
    names = {c.kernel.name for c in alive}
    losers = [c for c in judged if c.kernel.name not in names and c.verdict not in ("eligible", "unverified")]
    order = {verdict: place for place, verdict in enumerate(VERDICTS)}
    losers.sort(key=lambda c: (order[c.verdict], c.kernel.name))
    return Selection(op.name, problem, target, tuple(alive + losers), best)


def _judge(
    op: Op,
    problem: Problem,
    kernel: Kernel,
    target: Target,
    build: Build,
    store: Store,
    policy: Policy,
    layouts: frozenset[str] | None,
) -> Candidate:
    """The four questions, hardware, build, problem, verified, and the policy's wishes."""
    if reasons := kernel.requires.check_hardware(target, build):
        return Candidate(kernel, "hardware", tuple(reasons))
    if reasons := kernel.requires.check_build(target, build):
        return Candidate(kernel, "build", tuple(reasons))
    if reason := kernel.accepts(problem):
        return Candidate(kernel, "problem", (reason,))
    if reason := _unwanted(op, kernel, target, policy):
        return Candidate(kernel, "policy", (reason,))
    if layouts is not None and kernel.layouts and not layouts & set(kernel.layouts):
        reads, have = ", ".join(kernel.layouts), ", ".join(sorted(layouts))
        return Candidate(kernel, "problem", (f"reads layout {reads}; the weight is packed as {have}",))
    config = _tuned_config(op, problem, kernel, target, store) or kernel.config(problem, target)
    key = (
        op.name, kernel.name, kernel.code_hash(), config_key(config), str(op.verification(problem)), target_key(target),
        build.key(),
    )  # fmt: skip
    record = store.verifications.get(key)
    if record is None:
        return Candidate(kernel, "unverified", ("no record that it matched the reference here",), config=config)
    if not record.ok:
        return Candidate(kernel, "quarantined", (record.reason or "did not match the reference",), config=config)
    return Candidate(kernel, "eligible", (), config=config)


def _unwanted(op: Op, kernel: Kernel, target: Target, policy: Policy) -> str | None:
    if pattern := policy.excludes(kernel.name):
        return f"excluded by {pattern!r} in policy {policy.origin}"
    if policy.deterministic and not kernel.deterministic:
        return "not deterministic; the policy asks for it"
    if policy.batch_invariant and not kernel.batch_invariant:
        return "results depend on the batch; the policy asks for batch invariance"
    if kernel.language == "triton" and target.vendor == "cpu" and policy.rank(op.name, kernel.name) is None:
        return "on a CPU Triton only interprets, for tests: runs when pinned"
    if not kernel.auto and policy.rank(op.name, kernel.name) is None:
        return "runs only when pinned" + (f" ({kernel.proven})" if kernel.proven else "")
    return None


def _ranked(
    op: Op, problem: Problem, alive: list[Candidate], target: Target, store: Store, policy: Policy
) -> list[Candidate]:
    """Best first: pinned order, then measured time (exact, near, sibling), then estimate, then declared priority."""
    timed: list[Candidate] = []
    for candidate in alive:
        found = _expected(op, problem, candidate, target, store)
        if found is None and candidate.kernel.estimate is not None:
            estimate = candidate.kernel.estimate(problem, target)
            found = (estimate, "model") if estimate is not None else None
        us, source = found or (None, "priority")
        timed.append(replace(candidate, expected_us=us, source=source))
    estimated = all(c.expected_us is not None for c in timed)

    def order(candidate: Candidate) -> tuple[float, ...]:
        pin = policy.rank(op.name, candidate.kernel.name)
        measured = candidate.source in ("measured", "near", "sibling")
        by_time = candidate.expected_us if measured or estimated else None
        return (
            len(policy.pinned(op.name)) if pin is None else pin,
            0 if measured else 1,
            by_time if by_time is not None else 0.0,
            -candidate.kernel.priority,
        )

    return sorted(timed, key=lambda c: (order(c), c.kernel.name))


def _expected(
    op: Op, problem: Problem, candidate: Candidate, target: Target, store: Store
) -> tuple[float, str] | None:
    kernel, own = candidate.kernel, list(store.times(op.name, target_key(target)))
    exact = [t.us for t in own if t.kernel == kernel.name and t.problem == str(problem)]
    if exact:
        return min(exact), "measured"
    for source, records in (("near", own), ("sibling", list(store.sibling_times(op.name, target)))):
        near = _nearest(op, problem, records)
        times = [t.us for t in near if t.kernel == kernel.name]
        if times:
            scale = max(op.cost(problem).bytes, 1) / max(op.cost(op.problem(near[0].problem)).bytes, 1)
            return min(times) * scale, source
    return None


def _nearest(op: Op, problem: Problem, records: list[Timing]) -> list[Timing]:
    """The records of the one tuned problem nearest to `problem`, [] when none is near enough."""
    far = {text: distance(problem, op.problem(text)) for text in {record.problem for record in records}}
    best = min(far, key=lambda text: (far[text], text), default=None)
    return [r for r in records if r.problem == best] if best is not None and far[best] <= NEAR_LIMIT else []


def _tuned_config(op: Op, problem: Problem, kernel: Kernel, target: Target, store: Store) -> Config | None:
    own = [t for t in store.times(op.name, target_key(target)) if t.kernel == kernel.name]
    exact = [t for t in own if t.problem == str(problem)]
    records = exact or _nearest(op, problem, own)
    if not records:
        records = _nearest(op, problem, [t for t in store.sibling_times(op.name, target) if t.kernel == kernel.name])
    best = min(records, key=lambda t: t.us, default=None)
    return None if best is None else dict(best.config)
