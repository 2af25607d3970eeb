"""What the formats of DeepSeek share: their tags."""

from __future__ import annotations

import re

from gristmill.runtime.chat.formats import ChatFormat
from gristmill.runtime.chat.formats._bodies import HeadBody
from gristmill.runtime.chat.formats._structure import refuse_required
from gristmill.runtime.chat.formats._tags import TagParser, Tags

BEGIN = "<｜tool▁call▁begin｜>"
DROPPED = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁end｜>",
    "```<｜tool▁call▁end｜>",
    "<｜end▁of▁sentence｜>",
)


def deepseek_format(name: str, summary: str, marks: tuple[str, ...], head: re.Pattern[str]) -> ChatFormat:
    """A format whose calls begin with a head that has the group ``name``, then JSON."""
    tags = Tags(call={BEGIN: lambda tools: HeadBody(head)}, dropped=DROPPED)
    return ChatFormat(
        name=name,
        summary=summary,
        marks=(BEGIN, *marks),
        parser=lambda options, tail: TagParser(tags, options, tail),
        structure=lambda options, wanted, tail: refuse_required(options, wanted, name),
        special_tokens=True,
    )
