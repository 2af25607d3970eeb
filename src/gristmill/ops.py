"""Operations on torch tensors: ``gristmill.ops.rms_norm(x, weight, eps)``.

Every operation of the registry is here as a function, and as one torch operator in two overloads:
``torch.ops.gristmill.<op>.out(*arguments, plan, *outputs)`` is the primary one and writes into its last arguments;
``torch.ops.gristmill.<op>(*arguments, plan=0)`` allocates them. ``plan`` is the handle of a `BoundPlan` (0: find the
kernel from the arguments; the answer is remembered). Outputs are positional: keyword arguments cost more a call than a plan.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gristmill.autotune.bound import BoundPlan, fitting
from gristmill.autotune.guard import tensors
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


def _automatic(op: Op, arguments: Sequence[Any]) -> BoundPlan:
    """The plan for these arguments: by their shapes, dtypes and strides, described and resolved only the first time."""
    policy = Policy.current()
    key = (op.name, id(policy), *(_signature(argument) for argument in arguments))
    plan = _FOUND.get(key)
    if plan is None:
        described = op.problem(fitting(op, op.describe, arguments))
        device = next(t.device for a in arguments for t in tensors(a))
        static = op.static(described)
        known = (op.name, id(policy), static, str(device))
        plan = _FOUND.get(known) or bind(op.name, static, device, policy, op.unplanned)
        _FOUND[known] = _FOUND[key] = plan
    return plan


def _signature(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return (argument.shape, argument.dtype, argument.device, argument.stride())
    if isinstance(argument, list | tuple):
        return tuple(_signature(item) for item in argument)
    return argument


def _define(op: Op) -> None:
    """Register the torch operator of `op` and make its function."""
    count = len(op.parameters)
    defaults = tuple(_default(parameter.default) for parameter in op.parameters)
    typed = [f"{parameter.type} {parameter.name}" for parameter in op.parameters]
    inputs = ", ".join(
        text if p.default is None else f"{text}={p.default}"
        for text, p in zip(typed, op.parameters, strict=True)
    )
    outputs = [f"Tensor({chr(ord('m') + index)}!) {name}" for index, name in enumerate(op.outputs)]

    run = _runner(op)

    def allocate(*arguments: Any) -> list[torch.Tensor]:
        device = next(t.device for a in arguments for t in tensors(a))
        return [
            torch.empty(shape, dtype=dtype, device=device) for shape, dtype in fitting(op, op.like, arguments)
        ]

    def run_new(*given: Any) -> Any:
        # The dispatcher leaves out trailing arguments that are at their defaults.
        arguments = (*given, *(*defaults, 0)[len(given) :])
        made = allocate(*arguments[:count])
        run(*arguments, *made)
        return made[0] if len(made) == 1 else tuple(made) if made else None

    def fake_new(*given: Any) -> Any:
        fake_out(*given)
        made = allocate(*(*given, *defaults[len(given) :])[:count])
        return made[0] if len(made) == 1 else tuple(made) if made else None

    def fake_out(*given: Any) -> None:
        # A meta tensor among real ones comes here too, and would be answered by an empty tensor.
        devices = sorted({str(t.device) for a in given for t in tensors(a)})
        if len(devices) > 1:
            raise ValueError(f"{op.name}: tensors must be on one device, got {' and '.join(devices)}")

    returned = ", ".join("Tensor" for _ in op.outputs)
    _LIBRARY.define(
        f"{op.name}({inputs}, int plan=0) -> {returned if len(op.outputs) == 1 else f'({returned})'}"
    )
    _LIBRARY.impl(op.name, run_new, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gristmill::{op.name}", fake_new if op.outputs else fake_out, lib=_LIBRARY)
    packet = getattr(torch.ops.gristmill, op.name)
    if op.outputs:
        _LIBRARY.define(f"{op.name}.out({', '.join([*typed, 'int plan', *outputs])}) -> ()")
        _LIBRARY.impl(f"{op.name}.out", run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"gristmill::{op.name}.out", fake_out, lib=_LIBRARY)
    _FUNCTIONS[op.name] = _function(op, packet.default, packet.out if op.outputs else None)


def _runner(op: Op) -> Callable[..., None]:
    """The implementation of the mutating overload. Written out with its arguments' names: slicing ``*arguments`` would cost
    a tenth of the whole call."""
    inputs = ", ".join(f"p_{parameter.name}" for parameter in op.parameters)
    outputs = "".join(f", o_{name}" for name in op.outputs)
    source = f"""def run({inputs}, handle{outputs}):
    plan = plans[handle] if handle else automatic(op, ({inputs},))
    if plan is None:
        raise ValueError(f"{op.name}: the plan with handle {{handle}} was released")
    plan({inputs}{outputs})
"""
    scope: dict[str, Any] = {"plans": _PLANS, "automatic": _automatic, "op": op}
    exec(compile(source, f"<gristmill.ops.{op.name}>", "exec"), scope)
    function: Callable[..., None] = scope["run"]
    return function


def _default(text: str | None) -> Any:
    """The Python value of a default in a schema; None stands for no default too."""
    return None if text is None else ast.literal_eval(text)


def _function(op: Op, new: Callable[..., Any], into: Callable[..., Any] | None) -> Callable[..., Any]:
    signature = inspect.Signature(
        [
            inspect.Parameter(
                p.name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=inspect.Parameter.empty if p.default is None else _default(p.default),
            )
            for p in op.parameters
        ]
    )

    packed = [index for index, p in enumerate(op.parameters) if p.type == "Tensor[]"]

    def call(*arguments: Any, plan: BoundPlan | None = None, out: Any = None, **named: Any) -> Any:
        if named or len(arguments) < len(op.parameters):
            bound = signature.bind(*arguments, **named)
            bound.apply_defaults()
            arguments = bound.args
        for index in packed:  # a dense weight may be given as it is
            if isinstance(arguments[index], torch.Tensor):
                arguments = (*arguments[:index], [arguments[index]], *arguments[index + 1 :])
        handle = plan.handle if plan is not None else 0
        if out is None or into is None:
            return new(*arguments, handle)
        into(*arguments, handle, *((out,) if isinstance(out, torch.Tensor) else out))
        return out

    call.__name__ = call.__qualname__ = op.name
    call.__doc__ = (
        f"{op.summary}. Arguments: {signature}; outputs: {', '.join(op.outputs) or 'none (in place)'}.\n\n"
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
