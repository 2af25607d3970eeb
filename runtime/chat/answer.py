"""An answer in a conversation: the engine's chunks as deltas of a message, and the message when it is complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from gristmill.runtime.chat.conversation import Delta, Message, Role, ToolCall
from gristmill.runtime.chat.formats import OutputParser
from gristmill.runtime.completion import Chunk
from gristmill.runtime.errors import ErrorInfo, UsageError


@dataclass(frozen=True, slots=True)
class ChatChunk:
    """What a step added to an answer. `finish_reason` is as of `ChatAnswer`, in the last one."""

    delta: Delta
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A message of the assistant.

    Attributes:
        message: its content, thoughts and tool calls: the next message of the conversation.
        finish_reason: ``stop``, ``length``, ``tool_calls`` (it ended with calls, all of them whole), ``abort`` or ``error``.
        prompt_tokens, output_tokens, reasoning_tokens: token ids of the prompt, of the answer, and of its thoughts.
        error: the cause of ``error``.
    """

    message: Message
    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    reasoning_tokens: int
    error: ErrorInfo | None = None


@dataclass
class GrowingMessage:
    """The deltas of one message of the assistant, joined as they come.

    Attributes:
        texts, thoughts: the pieces of its content, and of its reasoning.
        calls: its tool calls.
    """

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        """The next delta."""
        self.texts.append(delta.content)
        self.thoughts.append(delta.reasoning)
        for call in delta.calls:
            if call.index == len(self.calls):
                self.calls.append(ToolCall(call.id, call.name, call.arguments))
            else:
                known = self.calls[call.index]
                self.calls[call.index] = replace(known, arguments=known.arguments + call.arguments)

    @property
    def content(self) -> str:
        """Its text so far."""
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        """Its thoughts so far."""
        return "".join(self.thoughts)

    def message(self) -> Message:
        """As a message of the conversation."""
        return Message("assistant", self.content, self.reasoning, tuple(self.calls))


def last_delta(parser: OutputParser, delta: Delta) -> Delta:
    """The last delta of a message, with what the parser has held back."""
    rest = parser.finish()
    return Delta(delta.content + rest.content, delta.reasoning + rest.reasoning, [*delta.calls, *rest.calls])


def parsed(parser: OutputParser, chunk: Chunk) -> ChatChunk:
    """A chunk of the engine as a part of a message."""
    delta, finish = parser.push(chunk.text, chunk.token_ids), chunk.finish_reason
    if finish is None:
        return ChatChunk(delta)
    delta = last_delta(parser, delta)
    # What ends the output within a call cuts it, unless it is a stop string that ends the call.
    whole = not parser.open_call
    if not whole and isinstance(stop := chunk.stop_reason, str) and not chunk.text.endswith(stop):
        end = parser.push(stop)
        whole = not parser.open_call
        if whole:
            delta = Delta(delta.content, delta.reasoning, [*delta.calls, *end.calls])
    return ChatChunk(delta, "tool_calls" if finish == "stop" and parser.calls and whole else finish)


class GrowingAnswer:
    """The chunks of one answer, joined as they come."""

    def __init__(self, parser: OutputParser, prompt_tokens: int) -> None:
        self._parser, self._prompt_tokens = parser, prompt_tokens
        self._message = GrowingMessage()
        self._tokens = 0
        self._finish = "abort"
        self._error: ErrorInfo | None = None

    def add(self, chunk: Chunk) -> ChatChunk:
        """The next chunk."""
        part = parsed(self._parser, chunk)
        self._tokens += len(chunk.token_ids)
        self._message.add(part.delta)
        if part.finish_reason is not None:
            self._finish, self._error = part.finish_reason, chunk.error
        return part

    def answer(self) -> ChatAnswer:
        """All so far."""
        return ChatAnswer(
            self._message.message(),
            self._finish,
            self._prompt_tokens,
            self._tokens,
            self._parser.reasoning_tokens,
            self._error,
        )


def as_messages(given: Sequence[Message | Mapping[str, Any]]) -> list[Message]:
    """Messages, also as mappings with role, content, and as OpenAI's API has them: reasoning_content, tool_calls, tool_call_id, name.

    Raises:
        UsageError: no messages, an unknown role or entry, a content that is no text.
    """
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise UsageError(f"messages must be a list of at least one message, got {given!r}")
    return [one if isinstance(one, Message) else _message(one, index) for index, one in enumerate(given)]


_ENTRIES = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")


def _message(given: Mapping[str, Any], index: int) -> Message:
    place = f"messages[{index}]"
    if not isinstance(given, Mapping):
        raise UsageError(f"{place} must be a Message or a mapping, got {given!r}")
    if unknown := [str(name) for name in given if name not in _ENTRIES]:
        raise UsageError(f"{place} has no {', '.join(unknown)}; known: {', '.join(_ENTRIES)}")
    role: Any = given.get("role")
    content = given.get("content")
    if role not in get_args(Role):
        raise UsageError(f"{place}: role must be one of {', '.join(get_args(Role))}, got {role!r}")
    if not isinstance(content, str | None):
        raise UsageError(f"{place}: content must be text, got {content!r}")
    calls = []
    for call in given.get("tool_calls") or ():
        function = call.get("function", {}) if isinstance(call, Mapping) else {}
        if not isinstance(function.get("name"), str) or not isinstance(function.get("arguments"), str):
            raise UsageError(
                f"{place}: a tool call is {{'id', 'function': {{'name', 'arguments': JSON text}}}}, got {call!r}"
            )
        calls.append(ToolCall(str(call.get("id", "")), function["name"], function["arguments"]))
    return Message(
        role,
        content or "",
        given.get("reasoning_content") or "",
        tuple(calls),
        given.get("tool_call_id") or "",
        given.get("name") or "",
    )
