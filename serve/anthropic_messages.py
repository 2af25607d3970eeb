"""The messages and tools of Anthropic's messages API as a conversation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from gristmill.runtime.chat.conversation import ChatOptions, Message, ToolCall
from gristmill.serve.errors import ApiError
from gristmill.serve.openai_messages import MAX_MESSAGES, GivenFunction, chat_options
from gristmill.serve.sampling import SamplingFields
from gristmill.serve.service import Service

CALL_PREFIX = "toolu_"
"""How ids of tool calls begin in this API; the model's own follow."""
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


class Block(msgspec.Struct):
    """A part of a content, with the fields of every kind that is known."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None


class GivenMessage(msgspec.Struct):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class GivenTool(msgspec.Struct):
    """A tool: one of the client's, or by its type one that the server would run."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct):
    """``tool_choice``."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """``thinking``."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct):
    """The form of the text."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """``output_config``."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class PromptFields(msgspec.Struct, kw_only=True):
    """The fields that make the prompt: those of count_tokens. Unknown fields are ignored, as clients send new ones every month."""

    messages: list[GivenMessage]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[GivenTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    mcp_servers: list[Any] | None = None


class MessagesRequest(PromptFields, kw_only=True):
    """The body of /v1/messages. Of the fields of other APIs it takes those that choose tokens."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    priority: int | None = None
    stream_interval_ms: float | None = None

    def sampling(self) -> SamplingFields:
        """How tokens are chosen, as the other APIs say it."""
        form = _format(self)
        return SamplingFields(
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            response_format=None if form is None else {"type": "json_schema", "schema": form.schema},
        )


def _format(request: PromptFields) -> OutputFormat | None:
    config = request.output_config
    return request.output_format if config is None or config.format is None else config.format


def prompt(service: Service, request: PromptFields) -> tuple[list[Message], ChatOptions]:
    """(conversation, how it is continued). ApiError names the field that is wrong."""
    if request.mcp_servers:
        raise ApiError(400, "mcp_servers are not supported: this server calls no others", param="mcp_servers")
    messages = _Conversation(request).messages
    thinking = request.thinking
    budget = None if thinking is None else thinking.budget_tokens
    if thinking is not None and thinking.type == "enabled" and (budget is None or budget < 1):
        raise ApiError(
            400, f"thinking.budget_tokens must be at least 1, got {budget}", param="thinking.budget_tokens"
        )
    effort = None if request.output_config is None else request.output_config.effort
    choice = request.tool_choice
    return messages, chat_options(
        service,
        [_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or ())],
        _choice(choice),
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        # This API's clients expect no thoughts unless they asked for them; "adaptive" leaves it to the model.
        reasoning={"enabled": True, "adaptive": None}.get(thinking.type, False) if thinking else False,
        reasoning_effort=None if effort is None else EFFORTS[effort],
        template_arguments={} if budget is None else {"thinking_budget": budget},
        continue_final=messages[-1].role == "assistant",
    )


def _choice(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None or choice.type in ("auto", "none"):
        return None if choice is None else choice.type
    return "required" if choice.type == "any" else {"name": choice.name}


def _tool(given: GivenTool, place: str) -> GivenFunction:
    if given.type not in (None, "custom"):
        raise ApiError(
            400,
            f"{place}: {given.type!r} is a tool of Anthropic's servers; this server takes tools of the client, with an input_schema",
            param=place,
        )
    if given.input_schema is None:
        raise ApiError(400, f"{place}.input_schema is missing", param=f"{place}.input_schema")
    return GivenFunction(given.name, given.description, given.input_schema, given.strict)


class _Turn:
    """What one side says until the other has the word: this API joins messages of one role."""

    def __init__(self, role: Literal["user", "assistant"]) -> None:
        self.role = role
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.calls: list[ToolCall] = []

    def message(self) -> Message:
        """It as a message."""
        between = "\n" if self.role == "user" else ""  # an assistant's text stays as the model wrote it
        return Message(self.role, between.join(self.texts), "".join(self.thoughts), tuple(self.calls))


class _Conversation:
    """Builds the messages. This API has tool results within a user's message."""

    def __init__(self, request: PromptFields) -> None:
        self.messages: list[Message] = []
        self._turn: _Turn | None = None
        self._names: dict[str, str] = {}
        if not request.messages:
            raise ApiError(400, "messages must have at least one message", param="messages")
        if len(request.messages) > MAX_MESSAGES:
            raise ApiError(
                400, f"messages: {len(request.messages)} are more than {MAX_MESSAGES}", param="messages"
            )
        if request.system is not None and (system := _text(request.system, "system", "\n\n")):
            self.messages.append(Message("system", system))
        for index, one in enumerate(request.messages):
            place = f"messages[{index}].content"
            if one.role == "system":
                self._add(Message("system", _text(one.content, place, "\n\n")))
                continue
            blocks = [Block("text", text=one.content)] if isinstance(one.content, str) else one.content
            if not blocks and one.role == "user":
                raise ApiError(400, f"{place} is empty", param=place)
            for number, block in enumerate(blocks):
                where = f"{place}[{number}]"
                if one.role == "assistant":
                    self._assistant(block, where)
                elif block.type == "tool_result":
                    self._add(self._result(block, where))
                else:
                    self._take_turn("user").texts.append(_text_of(block, where))
        self._end_turn()
        last = self.messages[-1] if self.messages else Message("user")
        if not self.messages or (last.role == "assistant" and (last.tool_calls or not last.content)):
            raise ApiError(
                400,
                "messages: the last one is an assistant's, which is continued: it must have text and no tool_use",
                param="messages",
            )

    def _take_turn(self, role: Literal["user", "assistant"]) -> _Turn:
        if self._turn is None or self._turn.role != role:
            self._end_turn()
            self._turn = _Turn(role)
        return self._turn

    def _end_turn(self) -> None:
        if self._turn is not None:
            self.messages.append(self._turn.message())
            self._turn = None

    def _add(self, message: Message) -> None:
        self._end_turn()
        self.messages.append(message)

    def _result(self, block: Block, place: str) -> Message:
        if not block.tool_use_id:
            raise ApiError(400, f"{place}.tool_use_id is missing", param=f"{place}.tool_use_id")
        text = "" if block.content is None else _text(block.content, f"{place}.content", "\n")
        call = block.tool_use_id.removeprefix(CALL_PREFIX)
        failed = "Error: " if block.is_error else ""
        return Message("tool", failed + text, tool_call_id=call, name=self._names.get(call, ""))

    def _assistant(self, block: Block, place: str) -> None:
        turn = self._take_turn("assistant")
        if block.type == "tool_use":
            if not block.id or not block.name or block.input is None:
                raise ApiError(400, f"{place}: tool_use needs id, name and input", param=place)
            call = block.id.removeprefix(CALL_PREFIX)
            self._names[call] = block.name
            turn.calls.append(ToolCall(call, block.name, json.dumps(block.input, ensure_ascii=False)))
        elif block.type == "thinking":
            if block.thinking is None:
                raise ApiError(400, f"{place}.thinking is missing", param=f"{place}.thinking")
            turn.thoughts.append(block.thinking)
        elif block.type != "redacted_thinking":
            turn.texts.append(_text_of(block, place))


def _text(content: str | Sequence[Block], place: str, between: str) -> str:
    """The text of a content that is text only."""
    if isinstance(content, str):
        return content
    return between.join(_text_of(block, f"{place}[{index}]") for index, block in enumerate(content))


def _text_of(block: Block, place: str) -> str:
    if block.type != "text":
        raise ApiError(
            400, f"{place}: a block of type {block.type!r} cannot be here: this model takes text", param=place
        )
    if block.text is None:
        raise ApiError(400, f"{place}.text is missing", param=f"{place}.text")
    return block.text
