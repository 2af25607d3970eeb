"""Formats of what models say: how thoughts and tool calls stand in their text.

Each file declares one `FORMAT`. No other file names a format: they are found by walking this package, and installed packages add
theirs under the entry point group ``gristmill.chat_formats``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Protocol

from gristmill.kernel_registry.declarations import Declarations, find_declarations
from gristmill.kernel_registry.plugins import PluginFailure
from gristmill.runtime.chat.conversation import ChatOptions, Delta
from gristmill.runtime.errors import UsageError
from gristmill.runtime.structured_output import StructuredOutput

ENTRY_POINTS = "gristmill.chat_formats"
PLAIN = "plain"
"""The format of models whose template has no marks that are known."""


class OutputParser(Protocol):
    """Parses one completion as it grows. What it returns does not depend on how the text is cut.

    Attributes:
        reasoning_tokens: ids that were thoughts.
        calls: tool calls that have begun.
        open_call: the last one was not closed: the output was cut.
    """

    reasoning_tokens: int
    calls: int
    open_call: bool

    def push(self, text: str, ids: Sequence[int] = ()) -> Delta:
        """More of the text, and its ids: what is certain now."""
        ...

    def finish(self) -> Delta:
        """What was held back, at the end."""
        ...


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """A format.

    Attributes:
        name: its name, for `ServeConfig.chat_format`.
        summary: in a line, what it looks like and who writes it.
        marks: a template that contains all of these texts has this format; () = no template has it.
        parser: makes a parser, from the options and the text of the prompt's end.
        structure: what the output looks like, from the options (calls that are required), what the request asks for, which thoughts may
            precede, and the text of the prompt's end; None = anything.
        stop: names of special tokens that end a message, beside the model's end tokens.
        special_tokens: the parser must see the texts of special tokens.
    """

    name: str
    summary: str
    marks: tuple[str, ...]
    parser: Callable[[ChatOptions, str], OutputParser]
    structure: Callable[[ChatOptions, StructuredOutput | None, str], StructuredOutput | None]
    stop: tuple[str, ...] = ()
    special_tokens: bool = False


@cache
def _declared() -> Declarations[ChatFormat]:
    return find_declarations(__name__, "FORMAT", ChatFormat, ENTRY_POINTS, lambda one: [one.name])


def formats() -> Mapping[str, ChatFormat]:
    """All formats by name, including those of plugins."""
    return _declared().by_name


def failures() -> tuple[PluginFailure, ...]:
    """Plugins of ``gristmill.chat_formats`` that failed to load, with reasons."""
    return _declared().failures


def find_format(template: str, name: str | None = None) -> ChatFormat:
    """The format with this name, else the one with the most marks that the template has, all of them; else ``plain``.

    Raises:
        UsageError: there is no format of this name; the message has similar ones.
    """
    known = formats()
    if name is not None:
        if name in known:
            return known[name]
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise UsageError(f"there is no chat format {name!r}; {hint}")
    fitting = [one for one in known.values() if one.marks and all(mark in template for mark in one.marks)]
    return max(fitting, key=lambda one: len("".join(one.marks)), default=known[PLAIN])
