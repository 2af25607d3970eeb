"""Calls as ``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``: GLM-4.5 to 4.7."""

from __future__ import annotations

import re

from gristmill.runtime.chat.formats import ChatFormat
from gristmill.runtime.chat.formats._bodies import Marks, PairBody
from gristmill.runtime.chat.formats._structure import refuse_required
from gristmill.runtime.chat.formats._tags import TagParser, Tags

NAME = "glm"
MARKS = Marks(
    head=re.compile(r"\s*(?P<name>[^<\s]+)\s*(?=<arg_key>|</tool_call>)"),
    key=re.compile(r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>"),
    value_end="</arg_value>",
    end="</tool_call>",
)
TAGS = Tags(call={"<tool_call>": lambda tools: PairBody(MARKS, tools)})

FORMAT = ChatFormat(
    name=NAME,
    summary="<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>: GLM-4.5 to 4.7",
    marks=("<tool_call>", "<arg_key>", "<arg_value>"),
    parser=lambda options, tail: TagParser(TAGS, options, tail),
    structure=lambda options, wanted, tail: refuse_required(options, wanted, NAME),
    stop=("<|observation|>", "<|user|>"),
    special_tokens=True,
)
