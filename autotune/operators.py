"""The torch operators of the registry's operations, and the functions of `gristmill.ops` that call them."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from gristmill.autotune.bound import BoundPlan, fitting
from gristmill.autotune.guard import tensors
from gristmill.autotune.resolve import Resolver
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import Registry, default_registry

_LIBRARY = torch.library.Library("gristmill", "DEF")
_PLANS: list[BoundPlan | None] = [None]
_RESOLVERS: dict[tuple[str, int], Resolver] = {}
_FOUND: dict[tuple[Any, ...], BoundPlan] = {}


def resolver(device: str | torch.device, policy: Policy | None = None) -> Resolver:
    """The resolver of a device under a policy (None: the one GRISTMILL_POLICY names), made once."""
    policy = policy or Policy.current()
    key = (str(device), id(policy))
    if key not in _RESOLVERS:
        _RESOLVERS[key] = Resolver(str(device), policy)
    return _RESOLVERS[key]


def bind(
    op: str,
    problem: Problem | str | Mapping[str, object],
    device: str | torch.device,
    policy: Policy | None = None,
    layouts: frozenset[str] | None = None,
) -> BoundPlan:
    """A plan for every call of `op` with the static part of `problem`, with a handle for the torch operator.

    problem: text such as ``n=4096,x=bf16``, a dict of axis values, or a Problem; its dynamic axes are ignored. device: a torch
    device of this machine. policy: None = the one that GRISTMILL_POLICY names. layouts: the layouts in which the weights are
    packed; None for operations without packed weights.

    Raises:
        UnknownError: no such operation.
        AxisError: a problem that it does not have.
        ValueError: no such device.
    """
    definition = default_registry().op(op)
    if not isinstance(problem, Problem):
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
        described = fitting(op, op.describe, arguments)
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


def _define(op: Op) -> Callable[..., Any]:
    """Register the torch operator of `op`: its function."""
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
    return _function(op, packet.default, packet.out if op.outputs else None)


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


_TYPES: Mapping[str, Any] = {
    "Tensor": torch.Tensor,
    "Tensor?": torch.Tensor | None,
    "Tensor[]": torch.Tensor | Sequence[torch.Tensor],  # packed tensors; a dense weight may be given as it is
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
}
"""Type of a schema, without marks of what is written -> Python's."""


def signature(op: Op) -> inspect.Signature:
    """The signature of the function of `op`: its arguments, then ``plan`` and, where it has outputs, ``out``, by keyword only."""
    parameters = [
        inspect.Parameter(
            p.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=inspect.Parameter.empty if p.default is None else _default(p.default),
            annotation=_TYPES[re.sub(r"\(.*\)", "", p.type)],
        )
        for p in op.parameters
    ]
    several = tuple[(torch.Tensor,) * len(op.outputs)] if op.outputs else None  # type: ignore[misc]
    returned: Any = torch.Tensor if len(op.outputs) == 1 else several
    optional = {"plan": BoundPlan | None} | ({"out": returned | None} if op.outputs else {})
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in optional.items()
    ]
    return inspect.Signature(parameters, return_annotation=returned)


def _function(op: Op, new: Callable[..., Any], into: Callable[..., Any] | None) -> Callable[..., Any]:
    """The function of `op`: torch's overloads with keyword arguments, defaults and `out`."""
    shown = signature(op)
    positional = shown.replace(
        parameters=[p for p in shown.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    )
    packed = [index for index, p in enumerate(op.parameters) if p.type == "Tensor[]"]
    taken = ", ".join(f"{p.type} {p.name}" for p in op.parameters)

    def call(*arguments: Any, plan: BoundPlan | None = None, out: Any = None, **named: Any) -> Any:
        if named or len(arguments) < len(op.parameters):
            try:
                bound = positional.bind(*arguments, **named)
            except TypeError as error:
                raise TypeError(f"{op.name}: {error}; its arguments are ({taken})") from None
            bound.apply_defaults()
            arguments = bound.args
        for index in packed:  # a dense weight may be given as it is
            if isinstance(arguments[index], torch.Tensor):
                arguments = (*arguments[:index], [arguments[index]], *arguments[index + 1 :])
        handle = plan.handle if plan is not None else 0
        if out is None:
            return new(*arguments, handle)
        if into is None:
            raise TypeError(f"{op.name} writes into its arguments and has no out")
        into(*arguments, handle, *((out,) if isinstance(out, torch.Tensor) else out))
        return out

    call.__name__ = call.__qualname__ = op.name
    call.__module__ = "gristmill.ops"
    call.__signature__ = shown  # type: ignore[attr-defined]
    call.__doc__ = documentation(op)
    return call


_PACKED = """One dense tensor; or, with a plan, the tensors of a layout that the plan reads. A QuantTensor is packed first
    (`gristmill.LinearWeight`, `gristmill.quant.pack`)."""

EVERY_OPERATION = """plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none.

Raises:
    ValueError: shapes, strides or devices that do not fit each other, or a plan of other calls.
    TypeError: a dtype that it does not take, or arguments of another number or name.
    NoKernelError: no kernel runs this here under the policy."""
"""What the function of every operation takes and raises."""


def documentation(op: Op) -> str:
    """The docstring of the function of `op`."""
    return f"{meaning(op)}\n\n{EVERY_OPERATION}"


def meaning(op: Op) -> str:
    """What `op` computes, from its reference, and the axes of its problems."""
    summary = (
        op.summary if op.summary[1] == " " else op.summary[0].upper() + op.summary[1:]
    )  # not the y of "y = x W^T"
    parts = [f"{summary}.", inspect.cleandoc(op.reference.__doc__ or "")]
    if written := [p.name for p in op.parameters if p.mutable and p.name != "workspace"]:
        parts.append(f"Written in place: {', '.join(written)}.")
    if packed := [p.name for p in op.parameters if p.type == "Tensor[]"]:
        parts.append(f"{', '.join(packed)}: {_PACKED}")
    axes = "\n".join(f"    {axis.name}: {axis.help}; {axis.wants()}" for axis in op.axes)
    return "\n\n".join([*parts, f"Axes of its problems:\n{axes}"])


def functions(registry: Registry) -> dict[str, Callable[..., Any]]:
    """The function of each operation of a registry; its torch operators are defined. An operation of a plugin for which that
    fails is left out of the registry, and the plugin is among its failures."""
    made: dict[str, Callable[..., Any]] = {}
    for op in [*registry.ops.values()]:
        try:
            made[op.name] = _define(op)
        except Exception as error:  # torch refuses, or a function of the plugin raises
            if op.name not in registry.plugins:
                raise
            registry.leave_out(op.name, error)
    return made
