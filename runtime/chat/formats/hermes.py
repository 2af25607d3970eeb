"""Calls as JSON in ``<tool_call>`` tags, thoughts in ``<think>``: Hermes, Qwen 2.5 and 3."""

from __future__ import annotations

from gristmill.runtime.chat.conversation import ChatOptions
from gristmill.runtime.chat.formats import ChatFormat
from gristmill.runtime.chat.formats._bodies import JsonBody
from gristmill.runtime.chat.formats._structure import call_in_json, chosen_tools, required_calls, thought_rule
from gristmill.runtime.chat.formats._tags import THINK, TagParser, Tags
from gristmill.runtime.structured_output import StructuredOutput

TAGS = Tags(call={"<tool_call>": lambda tools: JsonBody()}, dropped=("</tool_call>",))


def structure(options: ChatOptions, wanted: StructuredOutput | None, tail: str) -> StructuredOutput | None:
    """As `ChatFormat.structure`."""
    rules = call_in_json(chosen_tools(options), "arguments", "\n", "\n</tool_call>")
    return required_calls(
        options, wanted, thought_rule(THINK, options, tail), rules, "\n<tool_call>", opening="<tool_call>"
    )


FORMAT = ChatFormat(
    name="hermes",
    summary='<tool_call>{"name": ..., "arguments": {...}}</tool_call>, <think>: Hermes, Qwen 2.5, Qwen 3',
    marks=("<tool_call>",),
    parser=lambda options, tail: TagParser(TAGS, options, tail),
    structure=structure,
)
