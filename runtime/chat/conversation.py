"""A conversation and what a model adds to it, as data: the same for every API and every model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "developer", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool by the model. `arguments` is JSON text, as the model wrote it: it may be invalid."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Attributes:
        content: its text.
        reasoning: what an assistant thought before it.
        tool_calls: the calls of an assistant.
        tool_call_id: of a tool's result, the call that it answers.
        name: the author, or of a tool's result the tool, where known.
    """

    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON schema; `strict`: arguments are bound to it."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a conversation is continued.

    Attributes:
        tools: what the model may call.
        tool_choice: ``auto``: it decides; ``none``: no calls; ``required``: at least one call; ``named``: one call, of `tool_name`.
        parallel_tool_calls: False = at most one call.
        reasoning: whether the model thinks first; None = as its template has it.
        reasoning_effort: ``low``, ``medium`` or ``high``, for templates that have it.
        template_arguments: further variables of the template.
        add_generation_prompt: the prompt ends where an answer begins; False = after the last message.
        continue_final: the last message, an assistant's, is continued instead of followed by a new one.
        answer_bound: the request describes the answer: a message is calls or an answer, and tags in an answer mean nothing. `Chat` sets it.
    """

    tools: tuple[Tool, ...] = ()
    tool_choice: Literal["auto", "none", "required", "named"] = "auto"
    tool_name: str = ""
    parallel_tool_calls: bool = True
    reasoning: bool | None = None
    reasoning_effort: str | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final: bool = False
    answer_bound: bool = False


@dataclass(slots=True)
class CallDelta:
    """What a step added to one tool call: the first one of a call has its `id` and `name`.

    Attributes:
        index: which call of the message, from 0.
        arguments: more of the JSON text.
    """

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


@dataclass(slots=True)
class Delta:
    """What a step added to the assistant's message: text in whole characters, never a part of a tag."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[CallDelta] = ()
