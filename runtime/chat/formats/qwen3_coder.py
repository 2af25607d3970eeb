"""Calls in XML: ``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``: Qwen3-Coder, Qwen 3.5."""

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
    head=re.compile(r"\s*<function=(?P<name>[^>\n]+)>"),
    key=re.compile(r"<parameter=(?P<key>[^>\n]+)>"),
    value_end="</parameter>",
    end="</function>",
)
TAGS = Tags(call={"<tool_call>": lambda tools: PairBody(MARKS, tools)}, dropped=("</tool_call>",))


def structure(options: ChatOptions, wanted: StructuredOutput | None, tail: str) -> StructuredOutput | None:
    """As `ChatFormat.structure`."""
    rules = call_in_pairs(
        chosen_tools(options),
        lambda tool: text_part(f"\n<function={tool.name}>\n"),
        lambda key: text_part(f"<parameter={key}>\n"),
        "\n</parameter>\n",
        "</function>\n</tool_call>",
    )
    return required_calls(
        options, wanted, thought_rule(THINK, options, tail), rules, "\n<tool_call>", opening="<tool_call>"
    )


FORMAT = ChatFormat(
    name="qwen3_coder",
    summary="<tool_call><function=name><parameter=key>value</parameter>...: Qwen3-Coder, Qwen 3.5",
    marks=("<tool_call>", "<function=", "<parameter="),
    parser=lambda options, tail: TagParser(TAGS, options, tail),
    structure=structure,
)
