"""Tests of declared properties: determinism from run to run, and batch invariance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gristmill.autotune.guard import same_bits
from gristmill.autotune.metrics import error_of
from gristmill.autotune.verify import kernel_arguments, run_guarded, run_reference
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem

ROWS = 37
"""Rows of the batch that is cut: past every small tile, and no other size of the example problems."""

CUTS = ((0, 1), (36, 37), (4, 9), (7, 24))
"""Parts of the batch that are run alone."""

RUNS = 4


@dataclass(frozen=True)
class Properties:
    """What was seen; None = cannot be tried for this operation. broken: sentences, for what was declared and not seen."""

    deterministic: bool | None
    batch_invariant: bool | None
    broken: tuple[str, ...] = ()


def properties(
    op: Op, kernel: Kernel, configure: Callable[[Problem], Config], problem: Problem, device: str
) -> Properties:
    """Run `kernel` several times on equal arguments, and on parts of a batch next to the whole."""
    arguments = op.inputs(problem, 0, device)
    runs = [_run(op, kernel, configure(problem), arguments) for _ in range(RUNS)]
    deterministic = all(_same(runs[0], run) for run in runs[1:])
    invariant = _batch_invariant(op, kernel, configure, problem, device)
    broken = []
    if kernel.deterministic and not deterministic:
        broken.append("declared deterministic, but equal arguments gave different bits")
    if kernel.batch_invariant and invariant is False:
        broken.append("declared batch invariant, but a row's bits depend on the rows around it")
    return Properties(deterministic, invariant, tuple(broken))


def _batch_invariant(
    op: Op, kernel: Kernel, configure: Callable[[Problem], Config], problem: Problem, device: str
) -> bool | None:
    if op.bucket is None or op.bucket not in ("m", "t"):
        return None  # ragged batches have no rows to cut
    whole = problem.with_values(**{op.bucket: ROWS})
    if kernel.accepts(whole) is not None:
        return None
    arguments = op.inputs(whole, 0, device)
    full, reference = _run(op, kernel, configure(whole), arguments), run_reference(op, arguments)
    if any(len(result) != ROWS for result in (*full, *reference)):
        return None
    same = True
    for start, end in CUTS:
        small = whole.with_values(**{op.bucket: end - start})
        if kernel.accepts(small) is not None:
            continue
        cut = [_rows(argument, start, end) for argument in arguments]
        if not _fits(op, cut):
            return None
        rows = [result[start:end] for result in reference]
        # Only where the operation itself works row by row does a cut mean anything.
        if not error_of(op, small, cut, run_reference(op, cut), rows) <= op.tolerance(small).limit:
            return None
        same = same and _same(_run(op, kernel, configure(small), cut), [result[start:end] for result in full])
    return same


def _fits(op: Op, cut: Sequence[Any]) -> bool:
    """Whether cut arguments still are a call: they describe one, and no table of indices speaks of rows that are gone."""
    if any(
        isinstance(a, torch.Tensor)
        and a.dim()
        and not a.is_floating_point()
        and len(a) not in {end - start for start, end in CUTS}
        for a in cut
    ):
        return False
    try:
        op.describe(*cut)
    except (ValueError, TypeError):  # what `describe` raises for arguments that do not fit each other
        return False
    return True


def _rows(argument: Any, start: int, end: int) -> Any:
    if isinstance(argument, torch.Tensor) and argument.dim() and argument.shape[0] == ROWS:
        return argument[start:end].contiguous()
    return argument


def _run(op: Op, kernel: Kernel, config: Config, arguments: Sequence[Any]) -> list[torch.Tensor]:
    return run_guarded(op, kernel, config, kernel_arguments(op, kernel, arguments))[0]


def _same(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    return all(map(same_bits, first, second))
