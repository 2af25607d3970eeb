"""What the formats of DeepSeek share: their tags."""

from __future__ import annotations

import re
from collections.abc import Callable

from gristmill.runtime.chat.conversation import ChatOptions
from gristmill.runtime.chat.formats import ChatFormat
from gristmill.runtime.chat.formats._bodies import HeadBody
from gristmill.runtime.chat.formats._structure import call_of_each, chosen_tools, required_calls, thought_rule
from gristmill.runtime.chat.formats._tags import THINK, TagParser, Tags
from gristmill.runtime.grammar_parts import text_part
from gristmill.runtime.structured_output import StructuredOutput

BEGIN = "<｜tool▁call▁begin｜>"
DROPPED = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁end｜>",
    "```<｜tool▁call▁end｜>",
    "<｜end▁of▁sentence｜>",
)


OPENING, AROUND = "<｜tool▁calls▁begin｜>", ("", text_part("<｜tool▁calls▁end｜>"))


def deepseek_format(
    name: str,
    summary: str,
    marks: tuple[str, ...],
    head: re.Pattern[str],
    begin: Callable[[str], str],
    end: str,
    joint: str,
) -> ChatFormat:
    """A format whose calls begin with a head that has the group ``name``, then JSON.

    Args:
        begin: of a tool's name, the head as a model writes it.
        end, joint: what is after the JSON, and between two calls.
    """

    def structure(
        options: ChatOptions, wanted: StructuredOutput | None, tail: str
    ) -> StructuredOutput | None:
        rules = call_of_each(
            chosen_tools(options),
            lambda tool: text_part(BEGIN + begin(tool.name)),
            text_part(f"{end}<｜tool▁call▁end｜>"),
        )
        return required_calls(
            options,
            wanted,
            thought_rule(THINK, options, tail),
            rules,
            joint,
            AROUND,
            opening=OPENING,
            never=(BEGIN,),
        )

    tags = Tags(call={BEGIN: lambda tools: HeadBody(head)}, dropped=DROPPED)
    return ChatFormat(
        name=name,
        summary=summary,
        marks=(BEGIN, *marks),
        parser=lambda options, tail: TagParser(tags, options, tail),
        structure=structure,
        special_tokens=True,
    )
