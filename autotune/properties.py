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
"""Rows of the full batch: larger than every small tile, and different from all other sizes of the example problems."""

CUTS = ((0, 1), (36, 37), (4, 9), (7, 24))
"""Parts of the batch that are run alone."""

RUNS = 4


@dataclass(frozen=True)
class Properties:
    """Observed properties, None where the operation cannot be tested; `broken` has a message per declared property that does not hold."""

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
        return None  # ragged batches cannot be divided by rows
    full_problem = problem.with_values(**{op.bucket: ROWS})
    if kernel.accepts(full_problem) is not None:
        return None
    arguments = op.inputs(full_problem, 0, device)
    full, reference = _run(op, kernel, configure(full_problem), arguments), run_reference(op, arguments)
    if any(len(result) != ROWS for result in (*full, *reference)):
        return None
    same = True
    for start, end in CUTS:
        small = full_problem.with_values(**{op.bucket: end - start})
        if kernel.accepts(small) is not None:
            continue
        part = [_rows(argument, start, end) for argument in arguments]
        if not _fits(op, part):
            return None
        rows = [result[start:end] for result in reference]
        # The test is meaningful only if the operation itself works row by row.
        if not error_of(op, small, part, run_reference(op, part), rows) <= op.tolerance(small).limit:
            return None
        same = same and _same(
            _run(op, kernel, configure(small), part), [result[start:end] for result in full]
        )
    return same


def _fits(op: Op, part: Sequence[Any]) -> bool:
    """Whether the arguments of a part form a valid call: they describe one, and no index tensor refers to removed rows."""
    if any(
        isinstance(a, torch.Tensor)
        and a.dim()
        and not a.is_floating_point()
        and len(a) not in {end - start for start, end in CUTS}
        for a in part
    ):
        return False
    try:
        op.describe(*part)
    except (ValueError, TypeError):  # what `describe` raises for inconsistent arguments
        return False
    return True


def _rows(argument: Any, start: int, end: int) -> Any:
    if isinstance(argument, torch.Tensor) and argument.dim() and argument.shape[0] == ROWS:
        return argument[start:end].contiguous()
    return argument


def _run(op: Op, kernel: Kernel, config: Config, arguments: Sequence[Any]) -> list[torch.Tensor]:
    return run_guarded(op, kernel, config, kernel_arguments(op, kernel, arguments))[0]


def _same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return all(map(same_bits, left, right))
