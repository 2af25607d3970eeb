"""Bound plans: plans with loaded kernels. The hot path is a guard and a table lookup.

A bound plan belongs to one device: a call runs there whatever device is current, and refuses tensors of another. The guard keeps kernels
inside their buffers. ``prepare(sizes)`` resolves, verifies and loads; during the capture of a CUDA graph an unprepared size raises instead.

    >>> import torch
    >>> from gristmill import ops
    >>> x, w = torch.randn(3, 512), torch.ones(512)
    >>> plan = ops.bind("rms_norm", "n=512,x=fp32", "cpu").prepare([1, 4])
    >>> out = torch.empty_like(x)
    >>> torch.ops.gristmill.rms_norm.out(x, w, 1e-5, plan.handle, out)
    >>> torch.equal(out, ops.rms_norm(x, w, 1e-5)), plan.entry(3).m_max
    (True, 4)
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from gristmill.autotune import compilations
from gristmill.autotune.captures import refuses_first_runs
from gristmill.autotune.device import device_index
from gristmill.autotune.errors import UnpreparedError
from gristmill.autotune.resolve import Resolver
from gristmill.kernel_registry.kernel import Workspace
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.plan import (
    BUCKET_OF,
    BUCKETS,
    FINE,
    Plan,
    PlanEntry,
    bucket_index,
    bucket_sizes,
)
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.select import Candidate
from gristmill.kernels.call_list import UnrecordableError, is_recording
from gristmill.kernels.load import load

Runner = Callable[..., None]


class BoundPlan:
    """A plan on one device: call it with the operation's arguments and outputs. `gristmill.ops.bind` makes it.

    Buckets are resolved on first use, or in advance by `prepare`; during CUDA-graph capture an unprepared bucket raises.

    Attributes:
        layouts: the layouts of the packed weights; None for operations without packed weights. Where they are several, a weight is the list of
            the tensors of all of them, in the order of their names, and each bucket's kernel gets those of its own.
        sealed: nothing is verified any more (see `gristmill.ops.seal`).
        is_warm: a kernel that is selected from now on is late: reported by a warning, and counted.
        late: the kernels that were.
        binds: how often it was bound.
    """

    __slots__ = (
        "_call",
        "_cuda",
        "_guard",
        "_index",
        "_ran",
        "_recorded",
        "_runners",
        "_tensor",
        "binds",
        "entries",
        "handle",
        "is_warm",
        "late",
        "layouts",
        "op",
        "resolver",
        "sealed",
        "static",
    )

    def __init__(
        self, op: Op, static: Problem, resolver: Resolver, layouts: frozenset[str] | None = None
    ) -> None:
        self.op = op
        self.static = op.static(static)
        self.resolver = resolver
        self.layouts = layouts
        self.entries: list[PlanEntry | None] = [None] * (len(BUCKETS) + 1)
        self._runners: list[Runner | None] = [None] * (len(BUCKETS) + 1)
        self._recorded = self._runners  # those behind the recorders, while calls are recorded
        self._ran: set[tuple[object, ...]] = set()  # the kernels and configurations of `_load`
        one = next(iter(layouts)) if layouts is not None and len(layouts) == 1 else None
        self._guard = op.guard(self.static, None if one is None else resolver.registry.layout(one))
        self._cuda = resolver.target.vendor != "cpu"
        self._index = device_index(resolver.device)
        self._call = op.Call
        self._tensor = attrgetter(
            next(p.name for p in op.parameters if p.type.startswith("Tensor") and "[]" not in p.type)
        )
        self.handle = 0
        self.binds = 0
        self.sealed = False
        self.is_warm = False
        self.late = 0

    def __call__(self, *arguments: Any, **named: Any) -> None:
        """Run with the operation's arguments and outputs, by position or by name; raises what `run` does."""
        self.run(self._call(*arguments, **named))

    def run(self, call: Any) -> None:
        """Run a call of the operation (`Op.Call`); weights are the tensors of the plan's layouts.

        Raises:
            ValueError: a tensor on another device, or a call that does not match the plan.
            UnpreparedError: a size that was not prepared, during CUDA-graph capture.
            NoKernelError: a size that no kernel can run here.
        """
        if call.__class__ is not self._call and call.__class__.__name__ != self._call.__name__:
            raise ValueError(
                f"{self.op.name} planned for {self.static}: got a {call.__class__.__name__}, not a {self._call.__name__}"
            )
        if self._tensor(call).get_device() != self._index:
            raise ValueError(
                f"{self.op.name}: planned for {self.resolver.device}, called with a tensor on "
                f"{self._tensor(call).device}"
            )
        try:
            size = self._guard(call)
        except (IndexError, AttributeError) as error:
            raise unfit(self.op, call.values(), f"planned for {self.static}") from error
        if size:
            # `bucket_index`, inlined for decoding: this line and the call are the whole cost of a planned call.
            runner = self._runners[BUCKET_OF[size] if size <= FINE else bucket_index(size)] or self._late(
                size
            )
            if self._cuda and torch.accelerator.current_device_index() != self._index:
                with torch.accelerator.device_index(self._index):
                    runner(call)
            else:
                runner(call)

    def prepare(self, sizes: Iterable[int] | None = None) -> BoundPlan:
        """Resolve (verify) and load the kernels for these sizes of the dynamic axis; None = every bucket.

        Raises:
            ValueError: a size that is negative or no integer.
            NoKernelError: a size that no kernel can run here.
        """
        for size in bucket_sizes() if sizes is None else sizes:
            if not isinstance(size, int) or size < 0:
                raise ValueError(f"{self.op.name}: sizes are integers of at least 0, got {size!r}")
            index = bucket_index(size)
            if self._runners[index] is None:
                self._bind(index)
        return self

    def take(self, index: int, candidate: Candidate) -> None:
        """Load the kernel of a bucket, which was selected for its problem and is verified, unless the bucket has one."""
        if self._runners[index] is None:
            self._take(index, bucket_sizes()[index], candidate)

    def adopt(self, plan: Plan) -> BoundPlan:
        """Use the kernels of a finished plan (all its buckets) instead of resolving them again."""
        for entry in plan.entries:
            self._load(len(BUCKETS) if entry.m_max is None else bucket_index(entry.m_max), entry)
        return self

    def record(self, calls: dict[tuple[BoundPlan, int], None]) -> None:
        """Until `stop_recording`, add the plan and the bucket of each call by this thread to `calls` instead of running it. Outputs of
        integers are zeros, those of floats undefined."""
        self._recorded = self._runners
        self._runners = [
            partial(self._record_call, calls, threading.get_ident(), index)
            for index in range(len(self._runners))
        ]

    def stop_recording(self) -> None:
        """Run calls again."""
        self._runners = self._recorded

    def _record_call(
        self, calls: dict[tuple[BoundPlan, int], None], thread: int, index: int, call: Any
    ) -> None:
        if threading.get_ident() == thread:
            calls[self, index] = None
            for name in self.op.outputs:  # ids that no kernel has written must be valid as indices
                output = getattr(call, name)
                if not output.is_floating_point():
                    output.zero_()
            return
        runner = self._recorded[index] or self._bind(index)  # another model that shares the plan is serving
        runner(call)

    def workspace(self, size: int) -> Workspace:
        """The workspace that calls of this size need."""
        index = bucket_index(size)
        if self.entries[index] is None:
            self._first(size)
        entry = self.entries[index]
        if entry is None:
            raise UnpreparedError(f"{self.op.name}: bucket of size {size} has no kernel")
        kernel = self.resolver.kernel(self.op, entry.kernel)
        return kernel.workspace(self.op.at_bucket(self.static, size), entry.config)

    def entry(self, size: int) -> PlanEntry:
        """The kernel for calls of this size; resolves the bucket if necessary."""
        index = bucket_index(size)
        if self.entries[index] is None:
            self._first(size)
        plan_entry = self.entries[index]
        if plan_entry is None:
            raise UnpreparedError(f"{self.op.name}: bucket of size {size} has no kernel")
        return plan_entry

    def _late(self, size: int) -> Runner:
        if _capturing():
            raise UnpreparedError(
                f"{self.op.name} {self.static} was not prepared for size {size}; call prepare([{size}]) before capture"
            )
        return self._first(size)

    def _first(self, size: int) -> Runner:
        """Resolve the bucket of a call that needs it."""
        begin = time.perf_counter()
        runner = self._bind(bucket_index(size))
        if self.is_warm:
            self.late += 1
            warnings.warn(
                f"{self.op.name} {self.static}: the kernel for size {size} was selected while serving, in "
                f"{time.perf_counter() - begin:.2f} s: the warm-up did not cover it",
                RuntimeWarning,
                stacklevel=3,
            )
        return runner

    def problem(self, index: int) -> Problem:
        """The problem of a bucket, at its upper bound."""
        return self.op.at_bucket(self.static, bucket_sizes()[index])

    def _bind(self, index: int) -> Runner:
        size, problem = bucket_sizes()[index], self.problem(index)
        find = self.resolver.verified if self.sealed else self.resolver.resolve
        return self._take(index, size, find(self.op, problem, self.layouts).require())

    def _take(self, index: int, size: int, candidate: Candidate) -> Runner:
        readable = candidate.kernel.layouts if self.layouts is None else self.layouts
        return self._load(index, PlanEntry.of(size, candidate, readable))

    def _load(self, index: int, entry: PlanEntry) -> Runner:
        kernel = self.resolver.kernel(self.op, entry.kernel)
        runner: Runner = partial(load(kernel), entry.config)
        if kernel.language == "python":
            runner = torch.no_grad()(runner)  # torch refuses to record what writes into an output
        if self._cuda:
            compilations.watch(kernel.language)
        if self.layouts is not None and len(self.layouts) > 1:
            runner = self._among_layouts(runner, entry)
        if self._cuda and not kernel.capturable:
            runner = partial(_outside_capture, kernel.name, runner)
        if not self._cuda and kernel.language != "cpp":
            runner = partial(_outside_recording, kernel.name, runner)
        self.entries[index] = entry
        first: Runner = partial(self._run_first, index, self._code(index, kernel.language, entry), runner)
        self._recorded[index] = first
        return first

    def _run_first(self, index: int, code: tuple[object, ...], runner: Runner, call: Any) -> None:
        """A call of a bucket none of whose calls has run outside of a capture."""
        if _capturing():
            if refuses_first_runs() and code not in self._ran:
                raise UnpreparedError(
                    f"{self.op.name} {self.static}: its kernel for sizes up to {bucket_sizes()[index]} has not run yet"
                )
            runner(call)
        else:
            runner(call)
            self._ran.add(code)
            self._recorded[index] = runner

    def has_run(self, index: int) -> bool:
        """Whether the kernel of a bucket has run in its configuration outside of captures, for this bucket or another one of the plan."""
        entry = self.entries[index]
        if entry is None:
            return False
        language = self.resolver.kernel(self.op, entry.kernel).language
        return self._code(index, language, entry) in self._ran

    def _code(self, index: int, language: str, entry: PlanEntry) -> tuple[object, ...]:
        """What the device runs for a bucket. Chains of torch's operations choose that by sizes themselves."""
        return (index if language == "python" else None, entry.kernel, *sorted(entry.config.items()))

    def _among_layouts(self, runner: Runner, entry: PlanEntry) -> Runner:
        """`runner` for calls with the tensors of all layouts: it gets those of the entry's layout."""
        counts = {name: len(self.resolver.registry.layout(name).slots) for name in sorted(self.layouts or ())}
        names = list(counts)
        begin = sum(counts[name] for name in names[: names.index(str(entry.layout))])
        own_tensors = slice(begin, begin + counts[str(entry.layout)])
        weights = [p.name for p in self.op.parameters if p.type == "Tensor[]"]
        expected = f"the tensors of {' and '.join(names)}, {sum(counts.values())} in all"

        def run(call: Any) -> None:
            own = {}
            for name in weights:
                weight = getattr(call, name)
                if len(weight) != sum(counts.values()):
                    raise ValueError(
                        f"{self.op.name} planned for {self.static}: {name} must be {expected}, got {len(weight)}"
                    )
                own[name] = weight[own_tensors]
            call = call.replace(**own)
            self._guard(call)  # the first check covered only the tensors of the first layout
            runner(call)

        return run


def fitting(op: Op, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """`function(*arguments)`; ValueError if an argument has too few dimensions or tensors, or is no tensor."""
    try:
        return function(*arguments)
    except (IndexError, AttributeError) as error:
        raise unfit(op, arguments, f"takes ({op.schema})") from error


def unfit(op: Op, arguments: Sequence[Any], expected: str) -> ValueError:
    """The error for arguments with too few dimensions, or that are no tensors, with the expected and the received arguments."""

    def text_of(argument: Any) -> str:
        if isinstance(argument, list | tuple):
            return f"[{', '.join(map(text_of, argument))}]"
        return str([*argument.shape]) if hasattr(argument, "shape") else repr(argument)

    received = ", ".join(f"{p.name} {text_of(a)}" for p, a in zip(op.parameters, arguments, strict=False))
    return ValueError(
        f"{op.name} {expected}: an argument has too few dimensions or tensors, or is none: {received}"
    )


def _outside_capture(name: str, runner: Runner, call: Any) -> None:
    """Run a kernel that cannot be captured; UnpreparedError during capture."""
    if _capturing():
        raise UnpreparedError(
            f"{name} reads device memory on the host and cannot be captured in a CUDA graph; pin another "
            "kernel in the policy"
        )
    runner(call)


def _outside_recording(name: str, runner: Runner, call: Any) -> None:
    """Run a kernel in Python, which may read values of its tensors; UnrecordableError while a step on a CPU is recorded."""
    if is_recording():
        raise UnrecordableError(f"{name} runs in Python")
    runner(call)


def _capturing() -> bool:
    """Whether a step is captured, or recorded on a CPU."""
    return is_recording() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
