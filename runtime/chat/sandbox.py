"""The sandbox of chat templates: no attribute of Python's own, no change of arguments, and limits of time and memory.

A template comes with the weights of a model, from anybody. What it can repeat (loops, calls, filters) is counted as steps, and what it can
grow (texts and lists) by characters and elements, before it is made where an operation multiplies. Jinja calls nothing of the environment for
loops, ``~`` and slices: the parsed template is rewritten so that filters do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from functools import wraps
from time import monotonic
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARACTERS = 64 << 20
"""The longest prompt that a template may make, and the longest text or list on the way to it."""
MAX_MADE = 16 * MAX_CHARACTERS
"""Characters and elements of all texts and lists of one rendering."""
MAX_STEPS = 500_000
"""Turns of loops, calls and filters of one rendering."""
MAX_SECONDS = 10.0
"""Wall time of one rendering, which takes milliseconds. It is looked at in each step."""
PER_ELEMENT = 64
"""Characters that an element of a list counts as: a list that holds another twice, and so on, has no more elements than can be walked."""
MAX_BITS = 4096
"""The largest integer."""
MAX_PADDING = 1000
"""Characters that a format, an indent or a precision may ask for."""
MAX_WRAPPED = 100_000
"""Characters of a text that is cut into lines, which takes the square of a word's length."""

WIDE = re.compile(r"\d{4,}|\*|\{[^{}]*\{")
"""In a format: a width of four digits, or one that is an argument."""


class Budget:
    """What one rendering may still do, or one compilation, which computes constants."""

    def __init__(self) -> None:
        self.steps, self.characters, self.end = MAX_STEPS, MAX_MADE, monotonic() + MAX_SECONDS


BUDGET: ContextVar[Budget | None] = ContextVar("the budget of the rendering", default=None)


def step(count: int = 1) -> None:
    """SecurityError after too many steps."""
    budget = BUDGET.get()
    if budget is not None:
        budget.steps -= count
        if budget.steps < 0:
            raise SecurityError(f"more than {MAX_STEPS} steps")
        if monotonic() > budget.end:
            raise SecurityError(f"more than {MAX_SECONDS:g} seconds")


def make(size: int) -> None:
    """SecurityError if a text or list of this size is too large, alone or with all before it."""
    if size > MAX_CHARACTERS:
        raise SecurityError("a text or list that long")
    budget = BUDGET.get()
    if budget is not None:
        budget.characters -= size
        if budget.characters < 0:
            raise SecurityError("texts and lists that long")


def length(value: Any) -> int:
    """Characters or elements, 0 of anything else."""
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 0


def weigh(*values: Any) -> None:
    """SecurityError if the text of values would be too long: a list may have the same long text many times."""
    left, waiting = MAX_CHARACTERS, list(values)
    while waiting:
        value = waiting.pop()
        elements = not isinstance(value, str | bytes)
        left -= 1 + length(value) * (PER_ELEMENT if elements else 1)
        if left < 0:
            raise SecurityError("a text or list that long")
        if isinstance(value, Mapping):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            waiting += value


def check_result(result: Any) -> None:
    """SecurityError if what a filter or a call has made is too large: a number too, whose quotients take the square of its digits."""
    make(length(result))
    weigh(result)
    if isinstance(result, int) and result.bit_length() > MAX_BITS:
        raise SecurityError("a number that large")


def check_text(text: str | bytes, method: str, arguments: tuple[Any, ...]) -> None:
    """SecurityError if a method of a text, or the filter of that name, would make one that is too long."""
    first = arguments[0] if arguments else None
    if method in ("format", "format_map") and WIDE.search(str(text)):
        raise SecurityError("a format that wide")
    if method == "translate":
        raise SecurityError("translate")
    if method == "replace" and len(arguments) > 1:
        old, new = (part if isinstance(part, str | bytes) else str(part) for part in arguments[:2])
        make(len(text) + text.count(old) * len(new))  # type: ignore[arg-type]
    if method == "join" and length(first):
        make(len(text) * length(first))
    if method in ("ljust", "rjust", "center", "zfill") and isinstance(first, int):
        make(first)
    if method == "expandtabs" and isinstance(first, int):
        make(text.count("\t" if isinstance(text, str) else b"\t") * first)  # type: ignore[arg-type]


def check_filter(name: str, value: Any, arguments: tuple[Any, ...]) -> None:
    """SecurityError if a filter would make something that is too large."""
    step()
    weigh(value, *arguments)
    first = arguments[0] if arguments else None
    if name in ("indent", "tojson", "round", "wordwrap"):
        for padding in arguments:
            if (padding if isinstance(padding, int) else length(padding)) > MAX_PADDING:
                raise SecurityError(f"{name} by that much")
    if name == "wordwrap" and len(str(value)) > MAX_WRAPPED:
        raise SecurityError("a text that long in lines")
    if name == "indent":
        make(MAX_PADDING * str(value).count("\n"))
    elif name in ("batch", "slice") and isinstance(first, int):
        step(first)
    elif name in ("format", "replace"):
        check_text(str(value), name, arguments)
    elif name == "join" and isinstance(value, Iterable) and arguments:
        check_text(str(first), name, (value if length(value) else list(value),))
    elif name == "sum" and any(isinstance(argument, list | tuple) for argument in arguments):
        raise SecurityError("a sum that is no number")


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter within the budget. Jinja passes its own objects first, as the marks of `function` say."""
    own = 0 if getattr(function, "jinja_pass_arg", None) is None else 1

    @wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        value, rest = arguments[own], arguments[own + 1 :]
        if not isinstance(value, str | bytes | list | tuple | dict) and hasattr(value, "__next__"):
            value = list(value)
            arguments = (*arguments[:own], value, *rest)
        check_filter(name, value, (*rest, *named.values()))
        result = function(*arguments, **named)
        check_result(result)
        return result

    return called


@pass_context
def _each(context: Context, value: Any) -> Any:
    """What a loop goes through, whose turns are counted."""
    if not hasattr(value, "__len__"):
        value = list(value)
    step(len(value))
    return value


@pass_context
def _made(context: Context, value: Any) -> Any:
    """A slice."""
    make(length(value))
    return value


@pass_context
def _weighed(context: Context, value: Any) -> Any:
    """A list, tuple or dict that a template makes of others."""
    weigh(value)
    return value


@pass_context
def _joined(context: Context, values: list[Any]) -> str:
    """``a ~ b``."""
    weigh(values)
    return _concat([str(value) for value in values])


def _concat(pieces: Iterable[str]) -> str:
    """One text of several."""
    pieces = list(pieces)
    make(sum(map(len, pieces)))
    return "".join(pieces)


def _shown(value: Any) -> Any:
    """A value that is written into the prompt."""
    if not isinstance(value, str):
        weigh(value)
    return value


def _rewritten(node: nodes.Node) -> nodes.Node:
    """A parsed template with filters in place of what Jinja does by itself."""
    for name, value in node.iter_fields():
        if isinstance(value, list):
            setattr(node, name, [_rewritten(one) if isinstance(one, nodes.Node) else one for one in value])
        elif isinstance(value, nodes.Node):
            setattr(node, name, _rewritten(value))

    def filtered(value: nodes.Node, name: str) -> nodes.Filter:
        return nodes.Filter(value, name, [], [], None, None, lineno=node.lineno)

    if isinstance(node, nodes.For):
        node.iter = filtered(node.iter, "each of a loop")
    elif isinstance(node, nodes.Concat):
        return filtered(nodes.List(node.nodes, lineno=node.lineno), "joined")
    elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return filtered(node, "made by a slice")
    elif isinstance(node, nodes.List | nodes.Dict) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
        return filtered(node, "weighed")
    return node


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of templates."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(_concat)

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_shown, **options)
        self.globals.pop("lipsum")  # text of any length

    def bound(self) -> None:
        """Bounds the filters; after all have been added."""
        bounded = {name: _bounded(name, function) for name, function in self.filters.items()}
        own = {"each of a loop": _each, "weighed": _weighed, "joined": _joined, "made by a slice": _made}
        self.filters = {**bounded, **own}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _rewritten(tree)
        tree.set_environment(self)
        return tree

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call, of a macro and a loop too."""
        step()
        if isinstance(obj, LoopContext):
            step(sum(map(length, args)))
        method = getattr(obj, "__wrapped__", obj)
        if isinstance(text := getattr(method, "__self__", None), str | bytes):
            args = tuple(list(one) if hasattr(one, "__next__") else one for one in args)
            weigh(*args, *kwargs.values())
            check_text(text, method.__name__, (*args, *kwargs.values()))
        elif isinstance(text, int) and method.__name__ == "to_bytes":
            make(max((one for one in (*args, *kwargs.values()) if isinstance(one, int)), default=0))
        result = super().call(context, obj, *args, **kwargs)
        check_result(result)
        return result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """An operation of two values."""
        if operator == "**" and not (abs(left) < 1e6 and abs(right) < 64):
            raise SecurityError("a power that large")
        if operator == "+":
            make(length(left) + length(right))
        if operator == "*":
            both = isinstance(left, int) and isinstance(right, int)
            if both and left.bit_length() + right.bit_length() > MAX_BITS:
                raise SecurityError("a number that large")
            for one, other in ((left, right), (right, left)):
                if isinstance(other, int):
                    make(length(one) * other)
        if operator == "%" and isinstance(left, str):
            raise SecurityError("formatting by %")
        return super().call_binop(context, operator, left, right)
