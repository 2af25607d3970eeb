"""Jinja templates of conversations, as transformers renders them, without it: in a sandbox, within limits.

The rules (trimmed blocks, ``tojson`` without HTML escapes, ``raise_exception``, ``strftime_now``, the ``generation`` block) are those that
transformers documents for chat templates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser

from gristmill.runtime.chat.sandbox import BUDGET, MAX_CHARACTERS, Budget, Sandbox
from gristmill.runtime.errors import UsageError

MAX_ITERATIONS = 1_000_000
"""Numbers that all ranges of one rendering may have."""


class TemplateRefusal(UsageError):
    """The template refuses a conversation by ``raise_exception``; its message is the template's."""


class _Generation(Extension):
    """``{% generation %} ... {% endgeneration %}`` marks what the assistant says, for training: here it is its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise TemplateRefusal(str(message))


def _center(text: str, width: int = 80) -> str:
    return str(text).center(min(width, 1000))


def _environment() -> Sandbox:
    made = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    made.filters |= {"tojson": _tojson, "center": _center}
    made.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    made.bound()
    return made


class ChatTemplate:
    """A compiled template.

    Raises:
        UsageError: its text is no Jinja template.
    """

    def __init__(self, text: str, origin: str) -> None:
        self.text, self._origin = text, origin
        budget = BUDGET.set(Budget())
        try:
            self._template = _environment().from_string(text)
        except (TemplateError, RecursionError) as error:
            raise UsageError(f"{origin}: the chat template is wrong: {error}") from error
        finally:
            BUDGET.reset(budget)

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt of a conversation.

        Raises:
            UsageError: TemplateRefusal, or the template cannot be rendered with this conversation.
        """
        pieces: list[str] = []
        size = 0
        budget = BUDGET.set(Budget())
        try:
            for piece in self._template.generate(messages=messages, range=_ranges(), **variables):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_CHARACTERS:
                    raise SecurityError(f"a prompt of more than {MAX_CHARACTERS} characters")
        except TemplateRefusal as error:
            raise TemplateRefusal(f"the chat template refuses the conversation: {error}") from None
        except (
            TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            IndexError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise UsageError(
                f"{self._origin}: the chat template cannot be rendered with this conversation: {type(error).__name__}: {error}"
            ) from error
        finally:
            BUDGET.reset(budget)
        return "".join(pieces)


def _ranges() -> Callable[..., range]:
    """``range`` of one rendering: all of them together have a limited number of numbers."""
    left = MAX_ITERATIONS

    def limited(*arguments: int) -> range:
        nonlocal left
        made = range(*arguments)
        left -= len(made)
        if left < 0:
            raise SecurityError(f"ranges of more than {MAX_ITERATIONS} numbers")
        return made

    return limited
