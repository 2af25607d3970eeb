"""Plans of the calls that models make: bound once for what stays the same from step to step, whatever the lengths are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gristmill import ops
from gristmill.autotune.bound import BoundPlan
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry

_PLANS: dict[tuple[Any, ...], BoundPlan] = {}


def plan_of(
    name: str, shaped: Sequence[Tensor], fixed: tuple[Any, ...], arguments: Sequence[Any]
) -> BoundPlan:
    """The plan of an operation for these arguments, by the dtypes and all sizes but the first of `shaped`, and by `fixed`."""
    policy = Policy.current()
    key = (name, id(policy), fixed, *((t.dtype, t.device, t.shape[1:]) for t in shaped))
    plan = _PLANS.get(key)
    if plan is None:
        op = default_registry().op(name)
        problem = op.describe(*arguments)
        plan = _PLANS[key] = ops.bind(name, problem, shaped[0].device, policy, op.unplanned)
    return plan
