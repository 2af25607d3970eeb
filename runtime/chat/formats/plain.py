"""Text alone: no thoughts, no tool calls."""

from __future__ import annotations

from collections.abc import Sequence

from gristmill.runtime.chat.conversation import ChatOptions, Delta
from gristmill.runtime.chat.formats import PLAIN, ChatFormat
from gristmill.runtime.chat.formats._structure import strict
from gristmill.runtime.errors import UsageError
from gristmill.runtime.structured_output import StructuredOutput


class PlainParser:
    """Passes text on."""

    reasoning_tokens = 0
    calls = 0
    open_call = False

    def push(self, text: str, ids: Sequence[int] = ()) -> Delta:
        """The text."""
        return Delta(text)

    def finish(self) -> Delta:
        """Nothing is held back."""
        return Delta()


def structure(options: ChatOptions, wanted: StructuredOutput | None, tail: str) -> StructuredOutput | None:
    """What the request asks for. UsageError: a call is required, which this format does not have."""
    if options.tool_choice in ("required", "named"):
        raise UsageError(
            "this model's template has no tool calls that are known: name a format (chat_format), or leave tool_choice out"
        )
    if strict(options):
        raise UsageError(
            "this model's template has no tool calls that are known, so none can be strict: name a format (chat_format), or leave strict out"
        )
    return wanted


FORMAT = ChatFormat(
    name=PLAIN,
    summary="text alone",
    marks=(),
    parser=lambda options, tail: PlainParser(),
    structure=structure,
)
