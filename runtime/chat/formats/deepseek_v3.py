"""Calls in fenced JSON between DeepSeek's tags, thoughts in ``<think>``: DeepSeek V3 and R1."""

from __future__ import annotations

import re

from gristmill.runtime.chat.formats import ChatFormat
from gristmill.runtime.chat.formats._bodies import HeadBody
from gristmill.runtime.chat.formats._structure import refuse_required
from gristmill.runtime.chat.formats._tags import TagParser, Tags

NAME = "deepseek_v3"
HEAD = re.compile(r"\s*function\s*<｜tool▁sep｜>(?P<name>[^\n<{]+)\s*```json\s*")
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
    summary="<｜tool▁call▁begin｜>function<｜tool▁sep｜>name and fenced JSON: DeepSeek V3, R1",
    marks=("<｜tool▁call▁begin｜>", "```json"),
    parser=lambda options, tail: TagParser(TAGS, options, tail),
    structure=lambda options, wanted, tail: refuse_required(options, wanted, NAME),
    special_tokens=True,
)
