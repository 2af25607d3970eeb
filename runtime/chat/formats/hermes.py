"""Calls as JSON in ``<tool_call>`` tags, thoughts in ``<think>``: Hermes, Qwen 2.5 and 3."""

from __future__ import annotations

import json

from gristmill.runtime.chat.conversation import ChatOptions
from gristmill.runtime.chat.formats import ChatFormat
from gristmill.runtime.chat.formats._bodies import JsonBody
from gristmill.runtime.chat.formats._structure import call_schema, chosen_tools, required_calls, thought_rule
from gristmill.runtime.chat.formats._tags import THINK, TagParser, Tags
from gristmill.runtime.structured_output import StructuredOutput

TAGS = Tags(call={"<tool_call>": lambda tools: JsonBody()}, dropped=("</tool_call>",))


def structure(options: ChatOptions, wanted: StructuredOutput | None, tail: str) -> StructuredOutput | None:
    """As `ChatFormat.structure`."""
    schema = json.dumps(call_schema(chosen_tools(options), "arguments"))
    rules = f'call: "<tool_call>\\n" body "\\n</tool_call>"\nbody: %json {schema}'
    return required_calls(options, wanted, thought_rule(THINK, options, tail), rules, "\n")


FORMAT = ChatFormat(
    name="hermes",
    summary='<tool_call>{"name": ..., "arguments": {...}}</tool_call>, <think>: Hermes, Qwen 2.5, Qwen 3',
    marks=("<tool_call>",),
    parser=lambda options, tail: TagParser(TAGS, options, tail),
    structure=structure,
)
