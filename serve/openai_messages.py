"""The messages and tools of OpenAI's chat API as a conversation."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, Literal, get_args

import msgspec

from gristmill.runtime.chat.conversation import ChatOptions, Message, Role, Tool, ToolCall
from gristmill.serve.errors import ApiError
from gristmill.serve.sampling import check_schema
from gristmill.serve.service import Service

MAX_TOOLS = 256
MAX_MESSAGES = 16_384


class ContentPart(msgspec.Struct):
    """A part of a message's content. Only text is known."""

    type: str = "text"
    text: str | None = None
    refusal: str | None = None


class CalledFunction(msgspec.Struct):
    """The function of a tool call."""

    name: str
    arguments: str | dict[str, Any] | None = None


class GivenToolCall(msgspec.Struct):
    """A tool call in an assistant's message."""

    function: CalledFunction
    id: str = ""
    type: str | None = None


class GivenMessage(msgspec.Struct):
    """A message."""

    role: str
    content: str | list[ContentPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    name: str | None = None
    tool_calls: list[GivenToolCall] | None = None
    tool_call_id: str | None = None


class GivenFunction(msgspec.Struct):
    """A function that may be called."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class GivenTool(msgspec.Struct):
    """A tool."""

    function: GivenFunction
    type: str = "function"


def conversation(given: Sequence[GivenMessage]) -> list[Message]:
    """The messages. ApiError names the one that is wrong."""
    if not given:
        raise ApiError(400, "messages must have at least one message", param="messages")
    if len(given) > MAX_MESSAGES:
        raise ApiError(400, f"messages: {len(given)} are more than {MAX_MESSAGES}", param="messages")
    return [_message(one, f"messages[{index}]") for index, one in enumerate(given)]


def _message(given: GivenMessage, place: str) -> Message:
    role = "tool" if given.role == "function" else given.role
    if role not in get_args(Role):
        raise ApiError(
            400,
            f"{place}.role must be one of {', '.join(get_args(Role))}, got {given.role!r}",
            param=f"{place}.role",
        )
    calls = tuple(
        ToolCall(call.id, call.function.name, _arguments(call.function.arguments))
        for call in given.tool_calls or ()
    )
    if given.content is None and role not in ("assistant", "tool"):
        raise ApiError(400, f"{place}.content is missing", param=f"{place}.content")
    return Message(
        role,  # type: ignore[arg-type]
        text_of(given.content, place),
        reasoning=given.reasoning_content or given.reasoning or "",
        tool_calls=calls,
        tool_call_id=given.tool_call_id or "",
        name=given.name or "",
    )


def text_of(content: str | list[ContentPart] | None, place: str) -> str:
    """The text of a content. ApiError: a part is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "refusal", "input_text", "output_text") or text is None:
            raise ApiError(
                400,
                f"{place}.content[{index}]: this model takes text only, got a part of type {part.type!r}"
                + ("" if part.type not in ("text", "refusal") else " without text"),
                param=f"{place}.content",
            )
        texts.append(text)
    return "".join(texts)


def _arguments(given: str | dict[str, Any] | None) -> str:
    if given is None:
        return "{}"
    return given if isinstance(given, str) else json.dumps(given)


def tools_of(service: Service, given: Sequence[GivenFunction]) -> tuple[Tool, ...]:
    """The tools of a request. ApiError: too many, two of one name, a schema that is too large."""
    if len(given) > MAX_TOOLS:
        raise ApiError(400, f"tools: {len(given)} are more than {MAX_TOOLS}", param="tools")
    names: set[str] = set()
    tools = []
    for index, one in enumerate(given):
        if not one.name or one.name in names:
            raise ApiError(
                400,
                f"tools[{index}]: {'a tool needs a name' if not one.name else f'there are two tools {one.name!r}'}",
                param="tools",
            )
        names.add(one.name)
        if one.parameters is not None:
            check_schema(service, f"tools[{index}].parameters", one.parameters)
        tools.append(Tool(one.name, one.description or "", one.parameters or {}, bool(one.strict)))
    return tuple(tools)


def choose(tools: tuple[Tool, ...], choice: str | dict[str, Any] | None) -> dict[str, Any]:
    """``tool_choice`` as fields of `ChatOptions`. ApiError: a choice that the tools do not allow."""
    if choice is None or choice == "auto":
        return {"tool_choice": "auto"}
    if choice == "none":
        return {"tool_choice": "none"}
    if not tools:
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
    if choice in ("required", "any"):
        return {"tool_choice": "required"}
    if isinstance(choice, dict):
        function = choice.get("function")
        name = (function if isinstance(function, dict) else choice).get("name")
        if any(tool.name == name for tool in tools):
            return {"tool_choice": "named", "tool_name": name}
        raise ApiError(
            400,
            f"tool_choice names {name!r}; the tools are {', '.join(tool.name for tool in tools)}",
            param="tool_choice",
        )
    raise ApiError(
        400,
        f"tool_choice must be auto, none, required or a tool, got {choice!r}",
        param="tool_choice",
    )


class ToolName(msgspec.Struct):
    """The function of an allowed tool."""

    name: str


class AllowedTool(msgspec.Struct):
    """A tool within ``allowed_tools``."""

    function: ToolName
    type: str = "function"


class AllowedTools(msgspec.Struct):
    """``allowed_tools`` of ``tool_choice``."""

    tools: list[AllowedTool]
    mode: Literal["auto", "required"] = "auto"


def allowed_functions(
    functions: Sequence[GivenFunction], names: Collection[str | None]
) -> list[GivenFunction]:
    """Those with a name among `names`. The others stay out of the prompt: nothing else keeps a model from calling them. ApiError: there is no
    tool of a name."""
    if missing := set(names) - {one.name for one in functions}:
        raise ApiError(
            400,
            f"tool_choice allows {', '.join(sorted(map(str, missing)))}, no tool here",
            param="tool_choice",
        )
    return [one for one in functions if one.name in names]


def chat_options(
    service: Service,
    tools: Sequence[GivenFunction],
    choice: str | dict[str, Any] | None,
    **values: Any,
) -> ChatOptions:
    """How the conversation is continued. `values`: further fields of `ChatOptions`."""
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        try:
            allowed = msgspec.convert(choice.get("allowed_tools"), AllowedTools)
        except msgspec.ValidationError as error:
            raise ApiError(400, f"tool_choice.allowed_tools: {error}", param="tool_choice") from error
        tools = allowed_functions(tools, [one.function.name for one in allowed.tools])
        choice = allowed.mode
    known = tools_of(service, tools)
    return ChatOptions(tools=known, **choose(known, choice), **values)
