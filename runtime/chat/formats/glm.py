"""Calls as ``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``: GLM-4.5 to 4.7."""

from __future__ import annotations

import re

from gristmill.runtime.chat.conversation import ChatOptions
from gristmill.runtime.chat.formats import ChatFormat
from gristmill.runtime.chat.formats._bodies import Marks, PairBody
from gristmill.runtime.chat.formats._structure import (
    call_in_pairs,
    chosen_tools,
    required_calls,
    thought_rule,
)
from gristmill.runtime.chat.formats._tags import THINK, TagParser, Tags
from gristmill.runtime.grammar_parts import text_part
from gristmill.runtime.structured_output import StructuredOutput

MARKS = Marks(
    head=re.compile(r"\s*(?P<name>[^<\s]+)\s*(?=<arg_key>|</tool_call>)"),
    key=re.compile(r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>"),
    value_end="</arg_value>",
    end="</tool_call>",
)
TAGS = Tags(call={"<tool_call>": lambda tools: PairBody(MARKS, tools)})


def structure(options: ChatOptions, wanted: StructuredOutput | None, tail: str) -> StructuredOutput | None:
    """As `ChatFormat.structure`."""
    rules = call_in_pairs(
        chosen_tools(options),
        lambda tool: text_part(f"{tool.name}\n"),
        lambda key: text_part(f"<arg_key>{key}</arg_key>\n<arg_value>"),
        "</arg_value>\n",
        "</tool_call>",
    )
    return required_calls(
        options, wanted, thought_rule(THINK, options, tail), rules, "\n<tool_call>", opening="<tool_call>"
    )


FORMAT = ChatFormat(
    name="glm",
    summary="<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>: GLM-4.5 to 4.7",
    marks=("<tool_call>", "<arg_key>", "<arg_value>"),
    parser=lambda options, tail: TagParser(TAGS, options, tail),
    structure=structure,
    stop=("<|observation|>", "<|user|>"),
    special_tokens=True,
)
