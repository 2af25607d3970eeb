"""Thoughts in ``<think>``, no tool calls."""

from __future__ import annotations

from gristmill.runtime.chat.conversation import ChatOptions
from gristmill.runtime.chat.formats import ChatFormat
from gristmill.runtime.chat.formats._structure import after_thought, refuse_required, thought_rule
from gristmill.runtime.chat.formats._tags import THINK, TagParser, Tags
from gristmill.runtime.structured_output import StructuredOutput

NAME = "think"
TAGS = Tags()


def structure(options: ChatOptions, wanted: StructuredOutput | None, tail: str) -> StructuredOutput | None:
    """As `ChatFormat.structure`."""
    return after_thought(refuse_required(options, wanted, NAME), thought_rule(THINK, options, tail))


FORMAT = ChatFormat(
    name=NAME,
    summary="<think> thoughts </think>, then text",
    marks=("<think>",),
    parser=lambda options, tail: TagParser(TAGS, options, tail),
    structure=structure,
)
