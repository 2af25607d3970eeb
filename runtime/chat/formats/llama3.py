"""A message that is a call in JSON, several with a semicolon between: Llama 3.1 to 3.3."""

from __future__ import annotations

from gristmill.runtime.chat.conversation import ChatOptions
from gristmill.runtime.chat.formats import ChatFormat
from gristmill.runtime.chat.formats._bodies import SeriesBody
from gristmill.runtime.chat.formats._structure import call_in_json, chosen_tools, required_calls
from gristmill.runtime.chat.formats._tags import TagParser, Tags
from gristmill.runtime.structured_output import StructuredOutput

TAGS = Tags(
    think=None,
    call={"<|python_tag|>": lambda tools: SeriesBody(";,")},
    dropped=("<|eom_id|>", "<|eot_id|>"),
    first=("{", lambda tools: SeriesBody(";,")),
)


BLANK = r"\s\x1c-\x1f"
TEXT = rf"TEXT: /[{BLANK}]*([^{{{BLANK}](?s:.*))?/ & ~/(?s:.*)<\|(python_tag|eom_id|eot_id)\|>(?s:.*)/"
"""An answer without calls: it does not begin with a brace, and has no tag spelled in it."""


def structure(options: ChatOptions, wanted: StructuredOutput | None, tail: str) -> StructuredOutput | None:
    """As `ChatFormat.structure`."""
    rules = f"{call_in_json(chosen_tools(options), 'parameters')}\n{TEXT}"
    return required_calls(options, wanted, "", rules, "; ", text="TEXT")


FORMAT = ChatFormat(
    name="llama3",
    summary='{"name": ..., "parameters": {...}}: Llama 3.1 to 3.3',
    marks=("<|start_header_id|>", "parameters"),
    parser=lambda options, tail: TagParser(TAGS, options, tail),
    structure=structure,
    stop=("<|eom_id|>",),
    special_tokens=True,
)
