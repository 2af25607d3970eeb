"""Candidates: a kernel on a problem, timed in turn with others and audited meanwhile.

An audit is a timed sample like any other, over arguments whose content was just replaced in place and whose outputs were
poisoned: afterwards they must hold what the reference makes of the new content. See `gristmill.autotune.rotation`.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from gristmill.autotune import clock
from gristmill.autotune.device import free_bytes, on_device
from gristmill.autotune.errors import UnverifiableError
from gristmill.autotune.rotation import Contents, Finding, Rotation
from gristmill.autotune.timing import GPU_CALLS, CaptureError, Timed, list_count
from gristmill.autotune.verify import allocate_workspace, packing
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernels.load import load

LEAD = 3
"""Calls at the start of an audit that are checked but not timed: the refresh has changed the state of allocator and caches."""

STALE, COLD_US = 1.5, 2.0
"""How much slower than usual a kernel may be on new content: a factor, plus microseconds for code and tables that the
refresh has evicted from the caches."""

LEAST_US = 1e-3
"""The least time of a call: one that what ties isolated calls together takes longer than, or as long, is not measured."""

PAIRS = 6
"""How often new and known content are timed in turn before a kernel is reported to reuse results."""

_sleep = time.sleep


class WrongResultError(RuntimeError):
    """A kernel gave a wrong result, or broke a rule, while it was timed."""


PAUSE, PAUSE_AT_LEAST, CYCLES = 2.0, 10e-3, 2e9
"""The pause of an eager GPU candidate's stream before calls are audited for unfinished work: a multiple of the calls' time, the
minimum in seconds, and the highest rate in Hz of the counter that measures the pause."""


class Candidate:
    """`kernel` with `config` over the argument lists of `rotation`; `name` is its name in tables, by default the kernel's.

    The constructor and `audit` raise WrongResultError, which says what was wrong.

    Args:
        eager: on a GPU, launch each call even if a graph could hold it. Kernels that cannot be captured are always launched.
        isolated: each call's input depends on the previous call's output, so that no call starts before the previous one has ended; the time of
            the dependencies themselves is subtracted. ValueError if the operation has no such input.
        audited: audit at construction. Otherwise the caller audits the candidates whose times it uses.

    Attributes:
        error: the largest error of all audits.
        repeatable: equal inputs gave equal bits in all audits.
    """

    def __init__(
        self,
        kernel: Kernel,
        config: Config,
        rotation: Rotation,
        *,
        name: str = "",
        eager: bool = False,
        isolated: bool = False,
        audited: bool = True,
    ) -> None:
        self.name, self.kernel, self.config, self.rotation = (
            name or kernel.name,
            kernel,
            dict(config),
            rotation,
        )
        self.error, self.repeatable = 0.0, True
        self.samples: list[float] = []
        self.fresh: list[float] = []
        self._clock = clock.originals()
        self._launch = load(kernel)
        self._isolated = isolated
        if isolated and (why := rotation.tied()):
            raise ValueError(f"{kernel.name} cannot be timed isolated: {why}")
        # A workspace of its own: rotations are shared among kernels.
        self._workspace = allocate_workspace(rotation.op, kernel, config, rotation.problem, rotation.device)
        self._takes_workspace = "workspace" in rotation.op.Call.names
        lists = len(rotation.sets)
        # A kernel that writes in place must not see a list twice.
        once_only = rotation.in_place and lists > 1
        calls = None if rotation.device == "cpu" else lists if once_only else max(lists, GPU_CALLS)
        self._timed = self._made(self._step, calls, eager)
        self._once = self._timed
        if rotation.device != "cpu" and rotation.in_place and not once_only:
            # One round, for audits. A sample over a single list makes many calls.
            self._once = self._made(self._step, lists, eager)
        self._ties = self._made(self._tie, self._timed.calls, eager) if isolated else None
        self._tie_us = self._ties.sample() if self._ties is not None else 0.0
        if audited:
            self.audit()

    def _made(self, step: Callable[[], None], calls: int | None, eager: bool) -> Timed:
        def start() -> None:
            self.rotation.turn = 0

        try:
            return Timed(
                step,
                self.rotation.device,
                calls=calls,
                graph=self.kernel.capturable and not eager,
                start=start,
            )
        except CaptureError as error:
            raise WrongResultError(
                f"{self.kernel.name}: cannot be captured, and is declared to be: {error}"
            ) from error

    def _step(self) -> None:
        call = self.rotation.next()
        if self._takes_workspace:
            call.workspace = self._workspace
        self._launch(self.config, call)
        if self._isolated:
            self.rotation.tie()

    def _tie(self) -> None:
        self.rotation.next()
        self.rotation.tie()

    @property
    def calls(self) -> int:
        """Calls of a sample."""
        return self._timed.calls

    @property
    def timing(self) -> str:
        """The name of its timing mode, as stored."""
        return timing_name(self._timed.captured, len(self.rotation.sets) == 1, self._isolated)

    def sample(self) -> float:
        """Microseconds per call, over `calls` of them."""
        us = self._timed.sample()
        if self._ties is not None:
            self._tie_us = self._ties.sample()
        self.samples.append(max(us - self._tie_us, LEAST_US))
        return self.samples[-1]

    def audit(self) -> None:
        """A sample over fresh content, checked. WrongResultError names what was wrong."""
        rotation = self.rotation
        rotation.refresh()
        count = self._audited()
        threads, begin = _threads(), clock.now()
        self.fresh.append(self._around())
        results = rotation.snapshot(count)
        started = len(_threads() - threads)
        if rotation.device != "cpu":
            torch.cuda.synchronize()
        else:
            _sleep(0.002)  # time for threads that are still working to show
        took = clock.now() - begin
        finding = rotation.check(results)
        if rotation.device != "cpu" and not self._timed.captured and not finding.wrong:
            finding = self._held_back(count, results, took)
        self.repeatable &= finding.repeatable
        self.error = max(self.error, finding.error or 0.0)
        wrong = finding.wrong
        if not wrong and rotation.device == "cpu" and started:
            wrong = f"left {started} thread(s) running when the call returned"
        if not wrong and (changed := clock.tampered(self._clock)):
            wrong = f"replaced {changed}"
        if not wrong and not self.repeatable and self.kernel.deterministic:
            wrong = "equal inputs gave different bits, and it is declared deterministic"
        if wrong:
            raise WrongResultError(f"{self.kernel.name}: {wrong}")

    def conclude(self) -> None:
        """A last audit, and a check that new content takes no longer than known content.

        If it seems to, both are timed in turn after the same preparation, so that neither load nor the state of the memory
        allocator counts as reuse of results.
        """
        self.audit()
        if len(self.fresh) < 2:
            self.audit()  # in the first audit, code and tables are cold
        if not self.samples or min(self.fresh[1:]) <= STALE * statistics.median(self.samples) + COLD_US:
            return
        fresh, seen = [], []
        for _ in range(PAIRS):
            self.audit()
            fresh.append(self.fresh[-1])
            self.rotation.touch()
            seen.append(self._around())
            if len(fresh) > 1 and min(fresh) <= STALE * min(seen) + COLD_US:
                return
        raise WrongResultError(
            f"{self.kernel.name}: {min(fresh):.3g} us per call on content it had not seen, {min(seen):.3g} us "
            "on content it had: it reuses results"
        )

    def _held_back(self, count: int, results: Sequence[Sequence[torch.Tensor]], seconds: float) -> Finding:
        """Repeat the audit behind a pause of the stream, with everything queued: poison, calls, copies of the results.

        Nothing that the host does then lies between a call and the copy of its result. Work on another stream that waits for
        this one is too late for the copies; work that does not wait precedes the poison, which overwrites it. `seconds` is
        the time of the calls and of all work that they started. A graph does not contain such work, so replays reveal it.
        """
        stream = self._timed.stream
        with on_device(self.rotation.device), torch.cuda.stream(stream):
            torch.cuda._sleep(int(CYCLES * max(PAUSE * seconds, PAUSE_AT_LEAST)))
            self.rotation.restore()
            for _ in range(count):
                self._step()
            self.rotation.snapshot(count, results)
        torch.cuda.synchronize()
        return self.rotation.check(results)

    def _around(self) -> float:
        """Microseconds per call over one round of the lists, or over part of a round if calls are long."""
        count = self._audited()
        if self.rotation.device != "cpu":
            # One round: a second one would hide the unfinished work of the first.
            return max(self._once.sample(count) - self._tie_us, LEAST_US)
        lead = min(LEAD, count // 2)
        for _ in range(lead):
            self._step()
        return max(self._timed.sample(count - lead) - self._tie_us, LEAST_US)

    def _audited(self) -> int:
        """The number of lists in an audit, at most one round: an in-place kernel must not see a list twice."""
        lists = len(self.rotation.sets)
        return lists if self.rotation.device != "cpu" else min(max(self.calls, 2 * LEAD), lists)


def timing_name(captured: bool, hot: bool, isolated: bool = False) -> str:
    """The name of a timing mode, as stored: ``graph,cold``, ``eager,hot``, ``eager,cold,isolated`` ..."""
    return f"{'graph' if captured else 'eager'},{'hot' if hot else 'cold'}{',isolated' if isolated else ''}"


class TimingMode(NamedTuple):
    """How calls are timed. Stores and result files hold its name; "" is the mode that deployment uses."""

    eager: bool
    hot: bool
    isolated: bool

    @staticmethod
    def parse(name: str) -> TimingMode:
        """The inverse of `timing_name`."""
        parts = name.split(",")
        return TimingMode("eager" in parts, "hot" in parts, "isolated" in parts)


def shared_rotations(
    op: Any, problem: Any, device: str, kernels: Sequence[Kernel], *, hot: bool = False
) -> dict[str, Rotation]:
    """A rotation for each kernel, the same one for kernels that take the same arguments: equal data at equal addresses.

    UnverifiableError for a problem that is larger than the memory.
    """
    # Lists, and beside them two contents, each as the operation has it and packed.
    need, free = (
        (list_count(op.cost(problem).bytes, device, hot=hot) + 4) * op.cost(problem).bytes,
        free_bytes(device),
    )
    if need > free:
        raise UnverifiableError(
            f"{op.name} {problem} takes {need / 2**30:.1f} GiB to be timed and checked; {free / 2**30:.1f} GiB are free"
        )
    try:
        return _shared(op, problem, device, kernels, hot)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise UnverifiableError(f"{op.name} {problem}: no memory to time it with: {error}") from error


def _shared(op: Any, problem: Any, device: str, kernels: Sequence[Kernel], hot: bool) -> dict[str, Rotation]:
    made: dict[str, Rotation] = {}
    rotations = {}
    contents: Contents | None = None
    for kernel in kernels:
        key = packing(op, kernel, problem)
        if key not in made:
            contents = contents or Contents.first(op, problem, device)
            made[key] = Rotation(op, kernel, problem, device, hot=hot, contents=contents)
        rotations[kernel.name] = made[key]
    return rotations


def _threads() -> set[str]:
    try:
        return set(os.listdir("/proc/self/task"))
    except OSError:
        return set()
