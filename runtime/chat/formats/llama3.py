"""A message that is a call in JSON, several with a semicolon between: Llama 3.1 to 3.3."""

from __future__ import annotations

import json
from collections.abc import Mapping

from gristmill.runtime.chat.conversation import ChatOptions
from gristmill.runtime.chat.formats import ChatFormat
from gristmill.runtime.chat.formats._bodies import SeriesBody
from gristmill.runtime.chat.formats._structure import BLANK, call_in_json, chosen_tools, required_calls
from gristmill.runtime.chat.formats._tags import TagParser, Tags
from gristmill.runtime.errors import UsageError
from gristmill.runtime.structured_output import StructuredOutput

TAGS = Tags(
    think=None,
    call={"<|python_tag|>": lambda tools: SeriesBody(";,")},
    dropped=("<|eom_id|>", "<|eot_id|>"),
    first=("{", lambda tools: SeriesBody(";,")),
)


TEXT = rf"TEXT: /[{BLANK}]*([^{{{BLANK}](?s:.*))?/ & ~/(?s:.*)<\|(python_tag|eom_id|eot_id)\|>(?s:.*)/"
"""An answer without calls: it does not begin with a brace, and has no tag spelled in it."""


def structure(options: ChatOptions, wanted: StructuredOutput | None, tail: str) -> StructuredOutput | None:
    """As `ChatFormat.structure`. UsageError: an answer that the parser could take for a call."""
    if wanted is not None and not wanted.own_grammar and options.tools and options.tool_choice == "auto":
        _require_no_call(wanted)
    rules = f"{call_in_json(chosen_tools(options), 'parameters')}\n{TEXT}"
    return required_calls(options, wanted, "", rules, "; ", text="TEXT")


def _require_no_call(wanted: StructuredOutput) -> None:
    """UsageError: an answer may be a JSON object with a name, as calls are."""
    schema = wanted.json_schema
    if isinstance(schema, str):
        schema = json.loads(schema)
    if isinstance(schema, Mapping):
        kind = schema.get("type")
        named = "name" in schema.get("properties", {}) or schema.get("additionalProperties") is not False
        fits = isinstance(kind, str) and (kind != "object" or not (named or "patternProperties" in schema))
    else:
        fits = wanted.choice is not None and not any(one.lstrip().startswith("{") for one in wanted.choice)
    if not fits:
        raise UsageError(
            "beside tools, the chat format llama3 needs a response format that cannot be taken for a call, which is a JSON object with a name: "
            "a schema of another type, or of an object with additionalProperties false and without the property name"
        )


FORMAT = ChatFormat(
    name="llama3",
    summary='{"name": ..., "parameters": {...}}: Llama 3.1 to 3.3',
    marks=("<|start_header_id|>", "parameters"),
    parser=lambda options, tail: TagParser(TAGS, options, tail),
    structure=structure,
    stop=("<|eom_id|>",),
    special_tokens=True,
)
