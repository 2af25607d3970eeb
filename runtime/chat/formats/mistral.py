"""Calls after ``[TOOL_CALLS]``: a list of JSON objects, or a name, ``[ARGS]`` and JSON; thoughts in ``[THINK]``: Mistral, Magistral, Devstral."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gristmill.runtime.chat.conversation import ChatOptions, Tool
from gristmill.runtime.chat.formats import ChatFormat
from gristmill.runtime.chat.formats._bodies import HeadBody, Piece, SeriesBody
from gristmill.runtime.chat.formats._structure import call_in_json, chosen_tools, required_calls, thought_rule
from gristmill.runtime.chat.formats._tags import TagParser, Tags
from gristmill.runtime.grammar_parts import text_part
from gristmill.runtime.structured_output import StructuredOutput

HEAD = re.compile(r"\s*(?P<name>[^\[\{\s]+)\s*(?:\[CALL_ID\][^\[\{]*)?(?:\[ARGS\]|(?=\{))")
THINK = ("[THINK]", "[/THINK]")


class _Either:
    """A list, or a name and its arguments: by the first character."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._body: SeriesBody | HeadBody | None = None

    def feed(self, text: str) -> Piece:
        """As `Body.feed`."""
        if self._body is None:
            text = text.lstrip()
            if not text:
                return Piece()
            self._body = SeriesBody(",", "[", "]") if text[0] in "[{" else HeadBody(HEAD)
        return self._body.feed(text)


TAGS = Tags(think=THINK, call={"[TOOL_CALLS]": _Either}, dropped=("</s>",))


def structure(options: ChatOptions, wanted: StructuredOutput | None, tail: str) -> StructuredOutput | None:
    """As `ChatFormat.structure`; calls as a list after the special token."""
    rules = call_in_json(chosen_tools(options), "arguments")
    around = (text_part("["), text_part("]"))
    return required_calls(
        options, wanted, thought_rule(THINK, options, tail), rules, ", ", around, opening="[TOOL_CALLS]"
    )


FORMAT = ChatFormat(
    name="mistral",
    summary='[TOOL_CALLS][{"name": ..., "arguments": {...}}], or [TOOL_CALLS]name[ARGS]{...}: Mistral',
    marks=("[TOOL_CALLS]",),
    parser=lambda options, tail: TagParser(TAGS, options, tail),
    structure=structure,
    special_tokens=True,
)
