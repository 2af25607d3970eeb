"""Verification: does a kernel with a configuration match the reference here? Outputs are poisoned, memory is guarded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gristmill.autotune.device import on_device
from gristmill.autotune.errors import UnverifiableError
from gristmill.autotune.guard import Guarded, same_bits, tensors, written
from gristmill.autotune.metrics import error_of
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.load import load


@dataclass(frozen=True)
class Outcome:
    """The result of a verification; `error` is None when nothing could be compared."""

    ok: bool
    error: float | None
    tolerance: float
    reason: str = ""


@dataclass(frozen=True)
class Trial:
    """Random arguments of a problem and the outputs of the reference; `packed` has the arguments in the form that kernels take, by
    `packing`, filled on first use."""

    arguments: Sequence[Any]
    reference: Sequence[torch.Tensor]
    packed: dict[str, list[Any]] = field(default_factory=dict)

    def for_kernel(self, op: Op, kernel: Kernel, problem: Problem) -> list[Any]:
        """The arguments in the form that `kernel` takes, packed once for all kernels with the same packing."""
        key = packing(op, kernel, problem)
        if key not in self.packed:
            self.packed[key] = kernel_arguments(op, kernel, self.arguments)
        return list(self.packed[key])


def new_trial(op: Op, problem: Problem, device: str, seed: int = 0) -> Trial:
    """A trial of `problem`; UnverifiableError if the reference does not run."""
    try:
        arguments = op.inputs(problem, seed, device)
        return Trial(arguments, run_reference(op, arguments))
    except Exception as error:
        raise UnverifiableError(
            f"the reference of {op.name} {problem} did not run: {type(error).__name__}: {_without_frames(error)}"
        ) from error


def _without_frames(error: Exception) -> str:
    """What torch says of an error, without the places in its own code."""
    return str(error).partition("\nException raised from ")[0]


def verify(
    op: Op,
    kernel: Kernel,
    config: Config,
    problem: Problem,
    device: str,
    *,
    seed: int = 0,
    trial: Trial | None = None,
) -> Outcome:
    """Run `kernel` on random arguments of `problem`, or on those of `trial`, and compare with the reference.

    Outputs start poisoned (NaN, or the smallest integer) between guard bands that must stay as they were; arguments
    that the operation does not write must come back unchanged. An exception of the kernel is an outcome, not an error
    of the caller: its text is the reason. UnverifiableError where the fault is not the kernel's.
    """
    tolerance = op.tolerance(problem).limit
    trial = trial or new_trial(op, problem, device, seed)
    arguments, reference = trial.arguments, trial.reference
    try:
        with on_device(device):
            kernel_inputs = with_workspace(op, kernel, config, problem, trial.for_kernel(op, kernel, problem))
            outputs, trespass = run_guarded(op, kernel, config, kernel_inputs)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise UnverifiableError(
            f"{kernel.name} got no memory for {op.name} {problem} on {device}: {error}"
        ) from error
    except Exception as error:
        return Outcome(False, None, tolerance, f"{type(error).__name__}: {error}")
    if trespass:
        return Outcome(False, None, tolerance, trespass)
    figure = error_of(op, problem, arguments, outputs, reference)
    if not figure <= tolerance:
        return Outcome(False, figure, tolerance, f"error {figure:.3g} is over the tolerance {tolerance:.3g}")
    return Outcome(True, figure, tolerance)


class Verifier:
    """Verifies many kernels of one problem with the same arguments: generating them takes most of a verification.

    A kernel that fails is tried again with new arguments, in case another kernel damaged the shared ones.
    """

    def __init__(self) -> None:
        self._key: tuple[str, str, str] | None = None
        self._trial: Trial | None = None

    def verify(self, op: Op, kernel: Kernel, config: Config, problem: Problem, device: str) -> Outcome:
        """As `gristmill.autotune.verify.verify`."""
        key = (op.name, str(problem), device)
        failed = None
        if self._trial is not None and key == self._key:
            try:
                failed = verify(op, kernel, config, problem, device, trial=self._trial)
            except UnverifiableError:
                pass  # perhaps out of memory: drop the cached trial
            else:
                if failed.ok:
                    return failed
        self._key, self._trial = key, None  # before a new trial is made: two may not fit in memory
        try:
            trial = new_trial(op, problem, device)
            outcome = verify(op, kernel, config, problem, device, trial=trial)
        except UnverifiableError:
            if failed is None:
                raise
            return failed  # it left the device unusable
        self._trial = trial if outcome.ok else None
        return outcome


def packing(op: Op, kernel: Kernel, problem: Problem) -> str:
    """A key of the packing of arguments: the layout of this problem's weights for `kernel`, or the name of a kernel with its own
    packing; "" for operations that pack nothing."""
    if op.pack is None:
        return ""
    registry, scheme = default_registry(), dict(problem.values).get("w")
    fitting = [
        name for name in kernel.layouts if scheme is None or registry.layout(name).accepts(str(scheme))
    ]
    return fitting[0] if fitting else kernel.name


def kernel_arguments(op: Op, kernel: Kernel, arguments: Sequence[Any]) -> list[Any]:
    """`arguments` as `kernel` takes them: operations with packed weights pack theirs for its layout."""
    return list(arguments) if op.pack is None else op.pack(kernel, arguments)


def with_workspace(
    op: Op, kernel: Kernel, config: Config, problem: Problem, arguments: Sequence[Any]
) -> list[Any]:
    """`arguments` with the workspace that `kernel` asks for."""
    memory = allocate_workspace(
        op, kernel, config, problem, next(t.device for a in arguments for t in tensors(a))
    )
    return [
        memory if memory is not None and parameter.name == "workspace" else argument
        for parameter, argument in zip(op.parameters, arguments, strict=True)
    ]


def allocate_workspace(
    op: Op, kernel: Kernel, config: Config, problem: Problem, device: Any
) -> torch.Tensor | None:
    """A workspace as the runtime hands it over: zeros, or NaN in all float types, which stands for what others left there.
    None for a kernel that needs none."""
    need = kernel.workspace(problem, config)
    if not need.bytes or all(parameter.name != "workspace" for parameter in op.parameters):
        return None
    return torch.full((need.bytes,), 0 if need.zeroed else 0xFF, dtype=torch.uint8, device=device)


def run_reference(op: Op, arguments: Sequence[Any]) -> list[torch.Tensor]:
    """What the reference produces: the outputs that it returns, then the arguments that it writes in place."""
    copies = [
        a.clone() if p.mutable and isinstance(a, torch.Tensor) else a
        for p, a in zip(op.parameters, arguments, strict=True)
    ]
    returned = op.reference(*copies)
    made = [] if not op.outputs else [returned] if isinstance(returned, torch.Tensor) else list(returned)
    return made + written(op, copies)


def run_guarded(
    op: Op, kernel: Kernel, config: Config, arguments: Sequence[Any]
) -> tuple[list[torch.Tensor], str]:
    """Launch on copies with poisoned, guarded outputs.

    Returns the outputs, then the arguments written in place; and "", or what was written that must not be.
    """
    copies, guards, originals = [], [], []
    for parameter, argument in zip(op.parameters, arguments, strict=True):
        if parameter.mutable and isinstance(argument, torch.Tensor):
            copy = Guarded.make(parameter.name, argument.shape, argument.dtype, argument.device)
            copy.tensor.copy_(argument)
            guards.append(copy)
            copies.append(copy.tensor)
        else:
            copies.append(argument)
            originals += [(parameter.name, t, t.clone()) for t in tensors(argument)]
    outputs = []
    if op.outputs:
        for name, (shape, dtype) in zip(op.outputs, op.like(*copies), strict=True):
            device = next(t.device for a in copies for t in tensors(a))
            guards.append(Guarded.make(name, shape, dtype, device))
            outputs.append(guards[-1].tensor)
    load(kernel)(config, op.Call(*copies, *outputs))
    outputs += written(op, copies)
    if any(t.is_cuda for t in outputs):
        torch.cuda.synchronize()
    for guard in guards:
        if not guard.intact():
            return outputs, f"wrote outside {guard.name}"
    for name, now, original in originals:
        if not same_bits(now, original):
            return outputs, f"changed its input {name}"
    return outputs, ""
