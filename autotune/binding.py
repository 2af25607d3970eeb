"""Plans by their handles, and the resolver of each device and policy.

A handle is a hash of the arguments of `bind`. A compiled graph that contains it is therefore valid in another process, and
layers of one shape have the same handle: a traced model has one subgraph for all of them.
"""

from __future__ import annotations

import copyreg
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from gristmill.autotune.bound import BoundPlan, fitting
from gristmill.autotune.device import device_index
from gristmill.autotune.guard import tensors
from gristmill.autotune.packing import plan_layouts
from gristmill.autotune.resolve import Resolver
from gristmill.kernel_registry.arguments import Weight
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme


class _Plans(dict[int, BoundPlan]):
    """Handle -> plan."""

    def __missing__(self, handle: int) -> BoundPlan:
        raise ValueError(
            f"the plan with handle {handle} was released, or was never bound in this process: call gristmill.ops.bind"
        )


PLANS = _Plans()
_RESOLVERS: dict[tuple[str, int], Resolver] = {}
_AUTOMATIC: dict[tuple[Any, ...], BoundPlan] = {}
MOST_SIGNATURES = 1 << 14
"""Signatures of calls without a plan that are remembered; a program whose sizes change at every step would remember without end."""


def resolver(device: str | torch.device, policy: Policy | None = None) -> Resolver:
    """The resolver of a device under a policy (None: the one GRISTMILL_POLICY names), made once."""
    policy = Policy.current() if policy is None else policy
    if not isinstance(policy, Policy):
        raise TypeError(
            f"policy must be a Policy, got {type(policy).__name__}; Policy.load reads one from a file"
        )
    key = (str(device), id(policy))
    if key not in _RESOLVERS:
        _RESOLVERS[key] = Resolver(str(device), policy)
    return _RESOLVERS[key]


def bind(
    op: str,
    problem: Problem | str | Mapping[str, object],
    device: str | torch.device,
    policy: Policy | None = None,
    layouts: Collection[str] | None = None,
) -> BoundPlan:
    """A plan for every call of `op` with the static part of `problem`, with a handle for the torch operator.

    The same arguments give the same plan, and the same handle in every process. A plan over several layouts takes the tensors of
    all of them, in the order of their names (`LinearWeight.tensors`), and reads those of the kernel for the call's size.

    Args:
        problem: text such as ``n=4096,x=bf16``, a dict of axis values, or a Problem; its dynamic axes are ignored.
        device: a torch device of this machine.
        policy: None = the one that GRISTMILL_POLICY names.
        layouts: the layouts in which the weights are packed; None for operations without packed weights, and for dense weights that are given
            as they are.

    Raises:
        UnknownError: no such operation or layout.
        AxisError: a problem that it does not have.
        ValueError: no such device, or quantized weights without layouts.
    """
    definition = default_registry().op(op)
    if not isinstance(problem, Problem):
        problem = definition.problem(problem)
    static, device_resolver = definition.static(problem), resolver(device, policy)
    if layouts is None:
        layouts = _unpacked(definition, static)
    else:
        layouts = frozenset({layouts} if isinstance(layouts, str) else layouts)
        for layout in layouts:
            default_registry().layout(layout)
    handle = handle_of(definition, static, device_resolver, layouts)
    plan = PLANS.get(handle)
    if plan is None or plan.resolver is not device_resolver:
        plan = BoundPlan(definition, static, device_resolver, layouts)
        plan.handle = handle
        PLANS[handle] = plan
    plan.binds += 1
    return plan


def _unpacked(op: Op, static: Problem) -> frozenset[str] | None:
    """The layouts of a plan that names none: those of dense weights. A kernel would read quantized ones as whatever it takes."""
    for weight in op.arguments:
        if isinstance(weight, Weight) and not QuantScheme.parse(static.text(weight.scheme)).is_dense:
            raise ValueError(
                f"{op.name} {static}: the plan of a quantized {weight.name} needs the layouts that it is packed in, layouts=weight.layouts of a "
                "LinearWeight; gristmill.ops.layouts chooses them"
            )
    return op.unplanned


def layouts(
    op: str,
    problem: Problem | str | Mapping[str, object],
    device: str | torch.device,
    policy: Policy | None = None,
    without: Collection[str] = (),
) -> frozenset[str]:
    """The layouts in which the weights of a layer are to be packed: those that the fastest kernels read, within the policy's
    bound on memory.

    Kernels without a record are verified first, which takes seconds.

    Args:
        op, problem, device, policy: as for `bind`.
        without: layouts that cannot hold the weight.

    Raises:
        UnknownError: no such operation.
        AxisError: a problem that it does not have.
        NoKernelError: no kernel runs it here under the policy.
    """
    definition = default_registry().op(op)
    static = definition.static(definition.problem(problem))
    return plan_layouts(resolver(device, policy), static, frozenset(without))


def _as_bound(plan: BoundPlan) -> tuple[Any, ...]:
    """A plan in a pickle or a copy."""
    resolver = plan.resolver
    return _bound_again, (plan.op.name, plan.static, resolver.device, resolver.policy, plan.layouts)


def _bound_again(
    op: str, static: Problem, device: str, policy: Policy, layouts: frozenset[str] | None
) -> BoundPlan:
    """The plan of this process for a policy that is equal, not necessarily the same object."""
    for existing in _RESOLVERS.values():
        if existing.device == device and existing.policy == policy:
            return bind(op, static, device, existing.policy, layouts)
    return bind(op, static, device, policy, layouts)


copyreg.pickle(BoundPlan, _as_bound)


def handle_of(op: Op, static: Problem, resolver: Resolver, layouts: frozenset[str] | None) -> int:
    """The number of a plan, of 63 bits and never 0, from its operation, problem, device, policy and layouts."""
    policy = asdict(resolver.policy) | {"origin": "", "store": str(resolver.policy.store_path)}
    index = device_index(resolver.device)
    device = resolver.device.partition(":")[0] + (f":{index}" if index >= 0 else "")
    parts = [op.name, str(static), device, policy, None if layouts is None else sorted(layouts)]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8]) >> 1 or 1


def release(plan: BoundPlan) -> None:
    """Release a plan. Once it was released as often as it was bound, calls with its handle fail."""
    plan.binds = max(0, plan.binds - 1)
    if plan.binds == 0 and plan.handle:
        if PLANS.get(plan.handle) is plan:
            del PLANS[plan.handle]
        plan.handle = 0


def prepare(sizes: Iterable[int] | None = None) -> None:
    """Resolve, verify and load the kernels of every plan that is bound, for these sizes of its dynamic axis (None: all buckets).

    For the warm-up of a host, which then calls `seal`.

    Raises:
        NoKernelError: no kernel runs a size under the policy.
    """
    requested_sizes = None if sizes is None else sorted(set(sizes))
    for plan in list(PLANS.values()):
        plan.prepare(requested_sizes)


def seal(on: bool = True) -> None:
    """From now on the plans that are bound verify nothing, so that no request waits for it.

    A size that `prepare` has not covered gets the best kernel that is verified for it already, with a warning, and where there is
    none the call raises UnpreparedError. ``seal(False)`` lifts it. It does not hold for plans that are bound later.
    """
    for plan in PLANS.values():
        plan.sealed = on


def automatic(op: Op, arguments: Sequence[Any]) -> BoundPlan:
    """The plan for these arguments: by their shapes, dtypes and strides, described and bound only the first time."""
    policy = Policy.current()
    key = (op.name, id(policy), *(_signature(argument) for argument in arguments))
    plan = _AUTOMATIC.get(key)
    if plan is None:
        described = fitting(op, op.describe, arguments)
        device = next(t.device for a in arguments for t in tensors(a))
        if len(_AUTOMATIC) >= MOST_SIGNATURES:
            _AUTOMATIC.clear()
        plan = _AUTOMATIC[key] = bind(op.name, described, device, policy, op.unplanned)
    return plan


def _signature(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return (argument.shape, argument.dtype, argument.device, argument.stride())
    if isinstance(argument, list | tuple):
        return tuple(_signature(item) for item in argument)
    return argument
