"""Conversations: templates that make prompts of them, formats that make messages of outputs. Names are imported on first access."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill._lazy import lazy_names

if TYPE_CHECKING:
    from gristmill.runtime.chat.answer import ChatAnswer as ChatAnswer
    from gristmill.runtime.chat.answer import ChatChunk as ChatChunk
    from gristmill.runtime.chat.chat import Chat as Chat
    from gristmill.runtime.chat.conversation import ChatOptions as ChatOptions
    from gristmill.runtime.chat.conversation import Message as Message
    from gristmill.runtime.chat.conversation import Tool as Tool
    from gristmill.runtime.chat.conversation import ToolCall as ToolCall
    from gristmill.runtime.chat.formats import ChatFormat as ChatFormat
    from gristmill.runtime.chat.formats._bodies import HeadBody as HeadBody
    from gristmill.runtime.chat.formats._structure import call_of_each as call_of_each
    from gristmill.runtime.chat.formats._structure import chosen_tools as chosen_tools
    from gristmill.runtime.chat.formats._structure import required_calls as required_calls
    from gristmill.runtime.chat.formats._structure import thought_rule as thought_rule
    from gristmill.runtime.chat.formats._tags import THINK as THINK
    from gristmill.runtime.chat.formats._tags import TagParser as TagParser
    from gristmill.runtime.chat.formats._tags import Tags as Tags
    from gristmill.runtime.grammar_parts import text_part as text_part
    from gristmill.runtime.structured_output import StructuredOutput as StructuredOutput
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
