"""Calls in XML: ``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``: Qwen3-Coder, Qwen 3.5."""

from __future__ import annotations

import re

from gristmill.runtime.chat.formats import ChatFormat
from gristmill.runtime.chat.formats._bodies import Marks, PairBody
from gristmill.runtime.chat.formats._structure import refuse_required
from gristmill.runtime.chat.formats._tags import TagParser, Tags

NAME = "qwen3_coder"
MARKS = Marks(
    head=re.compile(r"\s*<function=(?P<name>[^>\n]+)>"),
    key=re.compile(r"<parameter=(?P<key>[^>\n]+)>"),
    value_end="</parameter>",
    end="</function>",
)
TAGS = Tags(call={"<tool_call>": lambda tools: PairBody(MARKS, tools)}, dropped=("</tool_call>",))

FORMAT = ChatFormat(
    name=NAME,
    summary="<tool_call><function=name><parameter=key>value</parameter>...: Qwen3-Coder, Qwen 3.5",
    marks=("<tool_call>", "<function=", "<parameter="),
    parser=lambda options, tail: TagParser(TAGS, options, tail),
    structure=lambda options, wanted, tail: refuse_required(options, wanted, NAME),
)
