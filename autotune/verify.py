"""Verification: does a kernel at a configuration match the reference here? Poisoned outputs, guarded memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gristmill.autotune.device import on_device
from gristmill.autotune.metrics import error_of
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem
from gristmill.kernels.interpreter import load

GUARD = 256
"""Elements of guard band before and after every output."""


@dataclass(frozen=True)
class Outcome:
    """What a verification found. error: the operation's figure (None when nothing could be compared)."""

    ok: bool
    error: float | None
    tolerance: float
    reason: str = ""


def verify(op: Op, kernel: Kernel, config: Config, problem: Problem, device: str, *, seed: int = 0) -> Outcome:
    """Run `kernel` on random arguments of `problem` and compare with the reference.

    Outputs start poisoned (NaN, or the smallest integer) between guard bands that must stay as they were; arguments
    that the operation does not write must come back unchanged. An exception of the kernel is an outcome, not an error
    of the caller: its text is the reason.
    """
    tolerance = op.tolerance(problem).limit
    arguments = op.inputs(problem, seed, device)
    reference = run_reference(op, arguments)
    try:
        with on_device(device):
            outputs, trespass = run_guarded(op, kernel, config, kernel_arguments(op, kernel, arguments))
    except Exception as error:
        return Outcome(False, None, tolerance, f"{type(error).__name__}: {error}")
    if trespass:
        return Outcome(False, None, tolerance, trespass)
    figure = error_of(op, problem, arguments, outputs, reference)
    if not figure <= tolerance:
        return Outcome(False, figure, tolerance, f"error {figure:.3g} is over the tolerance {tolerance:.3g}")
    return Outcome(True, figure, tolerance)


def kernel_arguments(op: Op, kernel: Kernel, arguments: Sequence[Any]) -> list[Any]:
    """`arguments` as `kernel` takes them: operations with packed weights pack theirs for its layout."""
    return list(arguments) if op.pack is None else op.pack(kernel, arguments)


def run_reference(op: Op, arguments: Sequence[Any]) -> list[torch.Tensor]:
    """What the reference produces: the outputs that it returns, then the arguments that it writes in place."""
    copies = [a.clone() if p.mutable and isinstance(a, torch.Tensor) else a
              for p, a in zip(op.parameters, arguments, strict=True)]  # fmt: skip
    returned = op.reference(*copies)
    made = [] if not op.outputs else [returned] if isinstance(returned, torch.Tensor) else list(returned)
    return made + _written(op, copies)


def run_guarded(
    op: Op, kernel: Kernel, config: Config, arguments: Sequence[Any]
) -> tuple[list[torch.Tensor], str]:
    """Launch on copies with poisoned, guarded outputs.

    Returns the outputs, then the arguments written in place; and "", or what was written that must not be.
    """
    copies, bands, originals = [], [], []
    for parameter, argument in zip(op.parameters, arguments, strict=True):
        if parameter.mutable and isinstance(argument, torch.Tensor):
            copy, band = _guarded(argument.shape, argument.dtype, argument.device)
            copy.copy_(argument)
            bands.append((parameter.name, band))
            copies.append(copy)
        else:
            copies.append(argument)
            originals += [(parameter.name, t, t.clone()) for t in _tensors(argument)]
    outputs = []
    if op.outputs:
        for name, (shape, dtype) in zip(op.outputs, op.like(*copies), strict=True):
            device = next(t.device for a in copies for t in _tensors(a))
            out, band = _guarded(shape, dtype, device)
            bands.append((name, band))
            outputs.append(out)
    load(kernel)(config, *copies, *outputs)
    outputs += _written(op, copies)
    if any(t.is_cuda for t in outputs):
        torch.cuda.synchronize()
    for name, (before, after, poison) in bands:
        if not (_all_poison(before, poison) and _all_poison(after, poison)):
            return outputs, f"wrote outside {name}"
    for name, now, original in originals:
        if not torch.equal(now.view(torch.uint8) if now.dtype.itemsize == 1 else now.nan_to_num(),
                           original.view(torch.uint8) if now.dtype.itemsize == 1 else original.nan_to_num()):  # fmt: skip
            return outputs, f"changed its input {name}"
    return outputs, ""


def _written(op: Op, arguments: Sequence[Any]) -> list[torch.Tensor]:
    return [
        a for p, a in zip(op.parameters, arguments, strict=True)
        if p.mutable and isinstance(a, torch.Tensor) and p.name != "workspace"
    ]  # fmt: skip


def _tensors(argument: Any) -> list[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        return [argument]
    return [t for t in argument if isinstance(t, torch.Tensor)] if isinstance(argument, list | tuple) else []


def _guarded(shape: Any, dtype: torch.dtype, device: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, float]]:
    size = torch.Size(shape).numel()
    poison = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min if dtype != torch.uint8 else 171
    flat = torch.empty(size + 2 * GUARD, dtype=dtype, device=device)
    flat.fill_(poison)
    return flat[GUARD : GUARD + size].view(shape), (flat[:GUARD], flat[GUARD + size :], poison)


def _all_poison(band: torch.Tensor, poison: float) -> bool:
    if band.dtype.is_floating_point:
        return bool(band.float().isnan().all())
    return bool((band == poison).all())
