"""Operations on torch tensors: ``gristmill.ops.rms_norm(x, weight, eps)``.

Every operation of the registry is here as a function, and as one torch operator in two overloads:
``torch.ops.gristmill.<op>`` allocates its outputs, ``torch.ops.gristmill.<op>.out`` writes into those it is given.
Both take ``plan``, the handle of a `BoundPlan` (0: find the kernel from the arguments; the answer is remembered).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gristmill.autotune.bound import BoundPlan
from gristmill.autotune.resolve import Resolver
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import UnknownError, default_registry

_LIBRARY = torch.library.Library("gristmill", "DEF")
_PLANS: list[BoundPlan | None] = [None]
_RESOLVERS: dict[tuple[str, Policy], Resolver] = {}
_FOUND: dict[tuple[Any, ...], BoundPlan] = {}
_FUNCTIONS: dict[str, Callable[..., Any]] = {}


def resolver(device: str | torch.device, policy: Policy | None = None) -> Resolver:
    """The resolver of a device under a policy (None: the one GRISTMILL_POLICY names), made once."""
    policy = policy or Policy.current()
    key = (str(device), id(policy))
    if key not in _RESOLVERS:
        _RESOLVERS[key] = Resolver(str(device), policy)
    return _RESOLVERS[key]


def bind(
    op: str,
    problem: Problem | str,
    device: str | torch.device,
    policy: Policy | None = None,
    layouts: frozenset[str] | None = None,
) -> BoundPlan:
    """A plan for every call of `op` with the static part of `problem`, with a handle for the torch operator."""
    definition = default_registry().op(op)
    if isinstance(problem, str):
        problem = definition.problem(problem)
    plan = BoundPlan(definition, problem, resolver(device, policy), layouts)
    plan.handle = len(_PLANS)
    _PLANS.append(plan)
    return plan


def release(plan: BoundPlan) -> None:
    """Forget a plan's handle; calls with it fail from now on."""
    if plan.handle:
        _PLANS[plan.handle] = None
        plan.handle = 0


def _planned(handle: int) -> BoundPlan:
    plan = _PLANS[handle] if 0 < handle < len(_PLANS) else None
    if plan is None:
        raise ValueError(f"no plan has handle {handle}; make one with gristmill.ops.bind")
    return plan


def _automatic(op: Op, arguments: Sequence[Any]) -> BoundPlan:
    """The plan for these arguments: by their shapes, dtypes and strides, described and resolved only the first time."""
    policy = Policy.current()
    key = (op.name, id(policy), *(_signature(argument) for argument in arguments))
    plan = _FOUND.get(key)
    if plan is None:
        described = op.problem(op.describe(*arguments))
        device = next(t.device for a in arguments for t in _tensors(a))
        static = op.static(described)
        known = (op.name, id(policy), static, str(device))
        plan = _FOUND.get(known) or bind(op.name, static, device, policy)
        _FOUND[known] = _FOUND[key] = plan
    return plan


def _signature(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return (argument.shape, argument.dtype, argument.device, argument.stride())
    if isinstance(argument, list | tuple):
        return tuple(_signature(item) for item in argument)
    return argument


def _tensors(argument: Any) -> list[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        return [argument]
    return [t for t in argument if isinstance(t, torch.Tensor)] if isinstance(argument, list | tuple) else []


def _define(op: Op) -> None:
    """Register the torch operator of `op` and make its function."""
    count = len(op.parameters)
    inputs = ", ".join(_schema(op, index) for index in range(count))
    outputs = ", ".join(f"Tensor({chr(ord('m') + index)}!) {name}" for index, name in enumerate(op.outputs))

    def run(*arguments: Any) -> None:
        handle = arguments[count]
        arguments = arguments[:count] + arguments[count + 1 :]
        plan = _planned(handle) if handle else _automatic(op, arguments[:count])
        plan(*arguments)

    if not op.outputs:
        name = f"gristmill::{op.name}"
        _LIBRARY.define(f"{op.name}({inputs}, int plan=0) -> ()")
        _LIBRARY.impl(op.name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(name, lambda *arguments: None, lib=_LIBRARY)
        _FUNCTIONS[op.name] = _function(op, getattr(torch.ops.gristmill, op.name).default, None)
        return

    def allocate(*arguments: Any) -> Any:
        inputs = arguments[:count]
        device = next(t.device for a in inputs for t in _tensors(a))
        made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in op.like(*inputs)]
        return made[0] if len(made) == 1 else tuple(made)

    def run_new(*arguments: Any, plan: int = 0) -> Any:
        handle = arguments[count] if len(arguments) > count else plan
        made = allocate(*arguments[:count])
        run(*arguments[:count], handle, *((made,) if isinstance(made, torch.Tensor) else made))
        return made

    def run_out(*arguments: Any, **outs: Any) -> None:
        run(*arguments, *(outs[name] for name in op.outputs)) if outs else run(*arguments)

    returned = "Tensor" if len(op.outputs) == 1 else "(" + ", ".join("Tensor" for _ in op.outputs) + ")"
    _LIBRARY.define(f"{op.name}.out({inputs}, int plan=0, *, {outputs}) -> ()")
    _LIBRARY.define(f"{op.name}({inputs}, int plan=0) -> {returned}")
    _LIBRARY.impl(f"{op.name}.out", run_out, "CompositeExplicitAutograd")
    _LIBRARY.impl(op.name, run_new, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gristmill::{op.name}.out", lambda *arguments, **outs: None, lib=_LIBRARY)
    torch.library.register_fake(f"gristmill::{op.name}", lambda *arguments, **rest: allocate(*arguments), lib=_LIBRARY)
    packet = getattr(torch.ops.gristmill, op.name)
    _FUNCTIONS[op.name] = _function(op, packet.default, packet.out)


def _schema(op: Op, index: int) -> str:
    parameter = op.parameters[index]
    default = "" if parameter.default is None else f"={parameter.default}"
    return f"{parameter.type} {parameter.name}{default}"


def _function(op: Op, new: Callable[..., Any], into: Callable[..., Any] | None) -> Callable[..., Any]:
    names = [parameter.name for parameter in op.parameters]

    def call(*arguments: Any, plan: BoundPlan | None = None, out: Any = None, **named: Any) -> Any:
        handle = plan.handle if plan is not None else 0
        if out is None or into is None:
            return new(*arguments, **named, plan=handle)
        outs = (out,) if isinstance(out, torch.Tensor) else tuple(out)
        into(*arguments, **named, plan=handle, **dict(zip(op.outputs, outs, strict=True)))
        return out

    call.__name__ = call.__qualname__ = op.name
    call.__doc__ = (
        f"{op.summary}. Arguments: {', '.join(names)}; outputs: {', '.join(op.outputs) or 'none (in place)'}.\n\n"
        f"{op.reference.__doc__ or ''}\n\nplan: a BoundPlan from `bind` (None: found from the arguments and remembered). "
        "out: the output tensor, or a tuple of them, to write into."
    )
    return call


for _op in default_registry().ops.values():
    _define(_op)


def __getattr__(name: str) -> Callable[..., Any]:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    if name.startswith("__"):
        raise AttributeError(name)
    try:
        default_registry().op(name)
    except UnknownError as error:
        raise AttributeError(f"gristmill.ops: {error}") from None
    raise AttributeError(name)


def __dir__() -> list[str]:
    return sorted([*_FUNCTIONS, "bind", "release", "resolver"])
