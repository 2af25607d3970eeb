"""Calls as a name and JSON between DeepSeek's tags, thoughts in ``<think>``: DeepSeek V3.1."""

from __future__ import annotations

import re

from gristmill.runtime.chat.formats import ChatFormat
from gristmill.runtime.chat.formats._bodies import HeadBody
from gristmill.runtime.chat.formats._structure import refuse_required
from gristmill.runtime.chat.formats._tags import TagParser, Tags

NAME = "deepseek_v31"
HEAD = re.compile(r"\s*(?P<name>[^\s<{]+)\s*<｜tool▁sep｜>\s*")
TAGS = Tags(
    call={"<｜tool▁call▁begin｜>": lambda tools: HeadBody(HEAD)},
    dropped=(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁end｜>",
        "```<｜tool▁call▁end｜>",
        "<｜end▁of▁sentence｜>",
    ),
)

FORMAT = ChatFormat(
    name=NAME,
    summary="<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}: DeepSeek V3.1",
    marks=("<｜tool▁call▁begin｜>",),
    parser=lambda options, tail: TagParser(TAGS, options, tail),
    structure=lambda options, wanted, tail: refuse_required(options, wanted, NAME),
    special_tokens=True,
)
