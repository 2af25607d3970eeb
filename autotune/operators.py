"""The torch operators of the registry's operations, and the functions of `gristmill.ops` that call them.

Overloads of ``torch.ops.gristmill.<op>``. *Inputs* are the arguments without the optional ones that are written in place (the
workspace, ``lse``): Inductor cannot functionalize those where they are None.

- default: ``(inputs, int plan=0) -> outputs``. Of an operation without outputs: ``(arguments, int plan=0) -> ()``.
- ``with_<names>``: the default overload with some of the arguments that it leaves out, all required.
- ``without_<name>``: the same of an operation without outputs, whose default overload leaves nothing out.
- ``out``: ``(arguments, int plan, outputs) -> ()``, the primary one. Positional, because keywords cost as much as a planned call.
- ``planned`` and ``planned_out``: ``(inputs, int handle) -> outputs``, without defaults, and the same with its outputs as keyword arguments and
  `torch.Tag.out`. Inductor calls the second for the first, and allocates the outputs together with its other buffers.

There is one operator per operation, never one per kernel. The size is read from host shapes inside the operator, so fake tensors never see it
and dynamic shapes compile once. Handle 0 derives a plan from the arguments and caches it. A plan over several layouts takes the tensors of
all of them, and the operator chooses by size, so that a traced layer is one call.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch

from gristmill.autotune.binding import PLANS, automatic
from gristmill.autotune.bound import BoundPlan, fitting
from gristmill.autotune.guard import refuse_shared, tensors
from gristmill.kernel_registry.argument_names import SCALARS
from gristmill.kernel_registry.arguments import Parameter
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.registry import Registry

_LIBRARY = torch.library.Library("gristmill", "DEF")


def _define(op: Op) -> Callable[..., Any]:
    """Register the torch operator of `op`: its function."""
    overloads = _overloads(op)
    short, inputs = overloads[()]
    written = [f"Tensor({chr(ord('m') + index)}!)" for index in range(len(op.outputs))]
    outputs = ", ".join(f"{kind} {name}" for kind, name in zip(written, op.outputs, strict=True))

    def fake(*arguments: Any) -> None:
        # Also called for a meta tensor among real ones, which would get an empty tensor as its result.
        devices = sorted({str(t.device) for a in arguments for t in tensors(a)})
        if len(devices) > 1:
            raise ValueError(f"{op.name}: tensors must be on one device, got {' and '.join(devices)}")

    def register(overload: str, schema: str, function: Any, fake: Any, *tags: torch.Tag) -> None:
        name = ".".join(filter(None, (op.name, overload)))
        _LIBRARY.define(f"{name}{schema}", tags=tags)
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"gristmill::{name}", fake, lib=_LIBRARY)

    def register_new(overload: str, taken: Sequence[Parameter], plan: str) -> None:
        code = _implementations(op, taken)

        def fake_new(*arguments: Any) -> Any:
            fake(*arguments)
            return _one_or_tuple(_allocate(op, code["arguments"](*arguments)))

        schema = f"({_typed(taken, '=' in plan)}, int {plan}) -> ({', '.join(['Tensor'] * len(written))})"
        register(overload, schema, code["new"], fake_new)

    code = _implementations(op, op.parameters)
    if not op.outputs:
        register("", f"({op.schema}, int plan=0) -> ()", code["run"], fake)
        if short != "default":
            code = _implementations(op, inputs)
            register(short, f"({_typed(inputs, True)}, int plan=0) -> ()", code["run"], fake)
        return _function(op)
    register_new("", inputs, "plan=0")
    for name, taken in [*overloads.values()][1:]:
        register_new(name, taken, "plan")
    register("out", f"({_typed(op.parameters, False)}, int plan, {outputs}) -> ()", code["run"], fake)
    if short == "planned":

        def fake_planned_out(*arguments: Any, **out_tensors: torch.Tensor) -> Any:
            fake(*arguments)
            return _one_or_tuple([out_tensors[name] for name in op.outputs])

        # Its last argument has another name than that of the default overload: torch treats overloads that differ only in defaults
        # as one when it deregisters them, and aborts the process.
        register_new("planned", inputs, "handle")
        schema = f"({_typed(inputs, False)}, int handle, *, {outputs}) -> ({', '.join(written)})"
        code = _implementations(op, inputs)
        register("planned_out", schema, code["planned_out"], fake_planned_out, torch.Tag.out)
    return _function(op)


def _overloads(op: Op) -> dict[tuple[str, ...], tuple[str, list[Parameter]]]:
    """Given arguments, of those that are optional and written in place -> the overload for such calls, and its arguments."""
    absent = [p.name for p in op.parameters if p.mutable and "?" in p.type]
    found = {}
    for given in [chosen for count in range(len(absent) + 1) for chosen in combinations(absent, count)]:
        taken = [p for p in op.parameters if p.name in given or p.name not in absent]
        if op.outputs and not given:
            overload = "planned" if _inductor_allocates(op, taken) else "default"
        elif op.outputs:
            overload = "_".join(["with", *given])
        else:
            overload = "default" if given or not absent else "_".join(["without", *absent])
        found[given] = overload, taken
    return found


def _typed(parameters: Sequence[Parameter], defaults: bool) -> str:
    """Arguments in torch schema syntax, with or without defaults."""
    return ", ".join(str(p) if defaults else f"{p.type} {p.name}" for p in parameters)


def _inductor_allocates(op: Op, inputs: Sequence[Parameter]) -> bool:
    """Whether this torch has `torch.Tag.out`, and Inductor of torch 2.13 calls the overload with that tag correctly.

    With one output, it passes the tensors first, then everything else, a list as its items, and the output as ``out``
    (torch/_inductor/ir.py, `FallbackKernel.create`). It supports no operator that writes into other arguments.
    """
    if not hasattr(torch.Tag, "out") or any(p.mutable for p in inputs):  # before torch 2.13
        return False
    kinds = [p.type for p in inputs]
    in_order = kinds == sorted(kinds, key=lambda kind: kind != "Tensor") and op.outputs == ("out",)
    return len(op.outputs) > 1 or (in_order and not {"Tensor?", "Tensor[]"} & {*kinds})


def _one_or_tuple(outputs: Sequence[torch.Tensor]) -> Any:
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _allocate(op: Op, arguments: Sequence[Any]) -> list[torch.Tensor]:
    """Empty outputs for a call."""
    device = next(t.device for a in arguments for t in tensors(a))
    outputs = fitting(op, op.like, arguments)
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in outputs]


def _implementations(op: Op, inputs: Sequence[Parameter]) -> dict[str, Callable[..., Any]]:
    """The functions of overloads that take some of the arguments.

    Generated with the names of the arguments: slicing ``*arguments`` would cost a tenth of the call. The dispatcher omits
    trailing arguments that equal their defaults.
    """
    passed, outputs = ", ".join(f"p_{p.name}" for p in inputs), ", ".join(op.outputs)
    taken = ", ".join(f"p_{p.python}" for p in inputs)
    filled = ", ".join(f"p_{p.name}" if p in inputs else "None" for p in op.parameters)
    source = f"""def run({taken}, handle=0{"".join(f", {name}=None" for name in op.outputs)}):
    plan = plans[handle] if handle else automatic(op, ({filled},))
    plan.run(Call({filled}, {outputs}))

def arguments({taken}, handle=0):
    return ({filled},)

def new({taken}, handle=0):
    made = allocate(op, ({filled},))
    run({passed}, handle, *made)
    return one_or_tuple(made)
"""
    if outputs:
        source += f"""
def planned_out({taken}, handle=0, *, {outputs}):
    run({passed}, handle, {outputs})
    return {outputs}
"""
    scope: dict[str, Any] = {"plans": PLANS, "automatic": automatic, "op": op, "Call": op.Call}
    scope |= {"allocate": _allocate, "one_or_tuple": _one_or_tuple}
    exec(compile(source, f"<gristmill.ops.{op.name}>", "exec"), scope)
    return scope


_TYPES: Mapping[str, Any] = {
    "Tensor": torch.Tensor,
    "Tensor?": torch.Tensor | None,
    "Tensor[]": torch.Tensor | Sequence[torch.Tensor],  # packed tensors; a dense weight may be given as it is
    **SCALARS,
}
"""Type of a schema, without marks of what is written -> Python's."""


def writer(op: Op, *given: str) -> Callable[..., None]:
    """A function of these arguments, a plan's handle and the outputs, by position: the overload ``out``, with the defaults of all other arguments. A
    layer that calls it keeps its meaning when `op` gets another optional argument, and a traced call is one operator.

    TypeError: an unknown argument, or a required one that is missing.
    """
    names, required = {p.name for p in op.parameters}, {p.name for p in op.parameters if p.default is None}
    if not required <= set(given) <= names or not op.outputs:
        raise TypeError(
            f"{op.name} takes {', '.join(sorted(required))}, may take {', '.join(sorted(names - required))}, and writes "
            f"{', '.join(op.outputs) or 'nothing'}; got {', '.join(given)}"
        )
    filled = ", ".join(p.name if p.name in given else str(p.default) for p in op.parameters)
    outputs = ", ".join(op.outputs)
    # A closure, because Dynamo looks up globals in the module that they belong to.
    source = f"lambda into: lambda {', '.join(given)}, handle, {outputs}: into({filled}, handle, {outputs})"
    write: Callable[..., None] = eval(source)(getattr(torch.ops.gristmill, op.name).out)
    return write


def binder(op: Op) -> Callable[..., Any]:
    """A function that returns the arguments in order, with the signature of the function of `op`: its arguments, then ``plan`` and,
    where it has outputs, ``out``, by keyword only."""
    parameters = [*(p.python for p in op.parameters), "*", "plan=None", *(["out=None"] if op.outputs else [])]
    names = "".join(f"{p.name}, " for p in op.parameters)
    bind: Callable[..., Any] = eval(f"lambda {', '.join(parameters)}: ({names})")
    several: Any = tuple[(torch.Tensor,) * len(op.outputs)]  # type: ignore[misc]
    returned: Any = {0: None, 1: torch.Tensor}.get(len(op.outputs), several)
    types = {"plan": BoundPlan | None, "out": returned and returned | None, "return": returned}
    types |= {p.name: _TYPES[re.sub(r"\(.*\)", "", p.type)] for p in op.parameters}
    bind.__annotations__ = types
    return bind


def _function(op: Op) -> Callable[..., Any]:
    """The function of `op`: torch's overloads with keyword arguments, defaults and `out`."""
    bound, names, count = binder(op), [p.name for p in op.parameters], len(op.parameters)
    packed = [(place, p.name) for place, p in enumerate(op.parameters) if p.type == "Tensor[]"]
    overloads = getattr(torch.ops.gristmill, op.name)
    into = overloads.out if op.outputs else overloads.default
    some = {
        given: (getattr(overloads, overload), [names.index(p.name) for p in taken])
        for given, (overload, taken) in _overloads(op).items()
    }
    new, inputs = some[()]
    one = len(op.outputs) == 1
    absent = [(place, name) for place, name in enumerate(names) if place not in inputs]

    def call(*arguments: Any, plan: BoundPlan | None = None, out: Any = None, **named: Any) -> Any:
        if named or len(arguments) != count:
            try:
                arguments = bound(*arguments, **named)
            except TypeError:
                raise misfit(arguments, named) from None
        for place, name in packed:  # a dense weight may be given as it is
            if isinstance(arguments[place], torch.Tensor):
                arguments = (*arguments[:place], [arguments[place]], *arguments[place + 1 :])
            elif not isinstance(arguments[place], list | tuple):
                raise unpacked(name, arguments[place])
        handle = 0
        if plan is not None:
            handle = plan.handle
            if not handle:
                raise ValueError(f"{op.name}: the plan was released: call gristmill.ops.bind")
        if out is not None:
            outputs = (out,) if isinstance(out, torch.Tensor) else out
            if not isinstance(outputs, list | tuple) or len(outputs) != len(op.outputs) or not outputs:
                raise misfit_out(out)
            if not torch.compiler.is_compiling():
                refuse_shared(op, arguments, outputs)
            into(*arguments, handle, *outputs)
            return out
        if not absent:
            made = new(*arguments, handle)
            return made if one and not made.requires_grad else inference_only(made)
        given = tuple([name for place, name in absent if arguments[place] is not None])
        if given and not op.outputs:
            return into(*arguments, handle)
        overload, places = some[given]
        return inference_only(overload(*[arguments[place] for place in places], handle))

    def inference_only(made: Any) -> Any:
        for output in (made,) if one else made or ():
            # A traced graph has no such hook: there torch warns, when the graph is made.
            if output.requires_grad and not torch.compiler.is_compiling():
                output.register_hook(no_gradient)
        return made

    def no_gradient(_: torch.Tensor) -> None:
        raise NotImplementedError(
            f"{op.name} has no derivative: gristmill's operations and modules are for inference. Call it under torch.no_grad(); layers that a "
            "gradient has to pass stay torch's own"
        )

    def unpacked(name: str, weight: Any) -> TypeError:
        return TypeError(
            f"{op.name}: {name} must be a dense tensor or, with a plan, the tensors of its layouts, got {type(weight).__name__}; "
            "gristmill.LinearWeight.pack(weight, layouts) packs a QuantTensor, and its tensors() are what a plan takes"
        )

    def misfit_out(out: Any) -> TypeError:
        if not op.outputs:
            return TypeError(f"{op.name} writes into its arguments and has no out")
        got = f"{len(out)} of them" if isinstance(out, list | tuple) else type(out).__name__
        wanted = f"a tuple of {len(op.outputs)} tensors" if len(op.outputs) > 1 else "a tensor"
        return TypeError(f"{op.name}: out must be {wanted} ({', '.join(op.outputs)}), got {got}")

    def misfit(arguments: Sequence[Any], named: Mapping[str, Any]) -> TypeError:
        try:
            return TypeError(f"{op.name}: {inspect.signature(bound).bind(*arguments, **named)}")
        except TypeError as error:
            return TypeError(f"{op.name}: {error}; its arguments are ({op.schema})")

    call.__name__ = call.__qualname__ = op.name
    call.__module__ = "gristmill.ops"
    call.__signature__ = inspect.signature(bound)  # type: ignore[attr-defined]
    call.__doc__ = f"{meaning(op)}\n\n{EVERY_OPERATION}"
    return call


_PACKED = """One dense tensor; or, with a plan, the tensors of a layout that the plan reads. A QuantTensor is packed first
    (`gristmill.LinearWeight`, `gristmill.quant.pack`)."""

EVERY_OPERATION = """plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
    with the arguments, unless it is an argument of its shape, element for element.

No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

Raises:
    ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
        shares memory with an argument.
    TypeError: a dtype that it does not take, or arguments of another number or name.
    NoKernelError: no kernel runs this here under the policy."""
"""What the function of every operation takes and raises."""


def meaning(op: Op) -> str:
    """What `op` computes, from its reference, and the axes of its problems."""
    summary = op.summary[0] if op.summary[1] == " " else op.summary[0].upper()  # not the y of "y = x W^T"
    summary += op.summary[1:]
    parts = [f"{summary}.", inspect.cleandoc(op.reference.__doc__ or "")]
    if written := [p.name for p in op.parameters if p.mutable and p.name != "workspace"]:
        parts.append(f"Written in place: {', '.join(written)}.")
    if packed := [p.name for p in op.parameters if p.type == "Tensor[]"]:
        parts.append(f"{', '.join(packed)}: {_PACKED}")
    axes = "\n".join(f"    {axis.name}: {axis.help}; {axis.wants()}" for axis in op.axes)
    return "\n\n".join([*parts, f"Axes of its problems:\n{axes}"])


def functions(registry: Registry) -> dict[str, Callable[..., Any]]:
    """The function of each operation of a registry; its torch operators are defined. An operation of a plugin for which that
    fails is removed from the registry, and the plugin is added to its failures."""
    by_name: dict[str, Callable[..., Any]] = {}
    for op in [*registry.ops.values()]:
        try:
            by_name[op.name] = _define(op)
        except Exception as error:  # torch refuses, or a function of the plugin raises
            if op.name not in registry.plugins:
                raise
            registry.leave_out(op.name, error)
    return by_name
