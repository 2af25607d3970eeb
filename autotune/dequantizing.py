"""Which weights are dequantized in each call, because no kernel of a device multiplies them as they are stored.

Such a call reads and writes the whole weight in floats before it multiplies. With the few rows of decoding, that takes several times as
long as the product.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.select import Selection

Select = Callable[[Problem, frozenset[str] | None], Selection]
"""A selection of the problem's operation, among kernels of some layouts (None: of all), that verifies nothing."""

FEW_ROWS = (1, 16)
"""Rows of x at which a kernel that dequantizes counts as slow; with many, dequantizing is a small part of the product."""
INSTEAD = ("int4_g128", "int4_g64", "int4_g32")
"""Schemes to advise where kernels multiply them: the first that divides the weight's rows."""


COLUMNS = ("k", "h", "i")
"""Axes of operations that are columns of their weights."""


def dequantizer(select: Select, static: Problem, layouts: frozenset[str] | None = None) -> Kernel | None:
    """The kernel that multiplies few rows by the weight of a static problem, if it dequantizes the weight; None if none does."""
    is_dense = QuantScheme.parse(static.text("w")).is_dense
    kernels = [] if is_dense else _at_few_rows(select, static, layouts)
    return next((kernel for kernel in kernels if is_dequantizing(kernel, static)), None)


def is_served(select: Select, static: Problem, policy: Policy | None = None) -> bool:
    """Whether the weight of a static problem is multiplied as it is stored, or by kernels that the policy pins."""
    kernels = _at_few_rows(select, static, None)
    return len(kernels) == len(FEW_ROWS) and all(
        not is_dequantizing(kernel, static)
        or (policy is not None and policy.rank(kernel.op, kernel.name) is not None)
        for kernel in kernels
    )


def advice(select: Select, static: Problem) -> str:
    """Schemes of the same weight that kernels multiply as they are stored, the dtype of x among them, as the end of a sentence."""
    dense = static.text("x")
    ways = [f"quant='{dense}'"] if _would_serve(select, static, dense) else []
    ways += islice((f"weights in {name}" for name in INSTEAD if _would_serve(select, static, name)), 1)
    return f"; faster: {' or '.join(ways)}" if ways else ""


def _would_serve(select: Select, static: Problem, scheme: str) -> bool:
    axes, columns = static.as_dict(), QuantScheme.parse(scheme).requires_k_multiple
    if any(static.integer(axis) % columns for axis in COLUMNS if axis in axes):
        return False
    of_its_weights = {axis: False for axis in ("act_order", "codes") if axis in axes}
    return is_served(select, static.with_values(w=scheme, **of_its_weights))


def _at_few_rows(select: Select, static: Problem, layouts: frozenset[str] | None) -> list[Kernel]:
    op = default_registry().op(static.op)
    selections = (select(op.at_bucket(static, size), layouts) for size in FEW_ROWS)
    return [selection.best.kernel for selection in selections if selection.best is not None]


def is_dequantizing(kernel: Kernel, problem: Problem) -> bool:
    """Whether a kernel dequantizes the weight of this problem."""
    return kernel.dequantizes and not QuantScheme.parse(problem.text("w")).is_dense
