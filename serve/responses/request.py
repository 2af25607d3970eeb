"""Requests of OpenAI's responses API."""

from __future__ import annotations

import bisect
import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from gristmill.runtime.chat.conversation import ChatOptions, Message
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.serve.errors import ApiError
from gristmill.serve.exchange import Exchange
from gristmill.serve.generation import beside, room
from gristmill.serve.openai_messages import GivenFunction, allowed_functions, chat_options
from gristmill.serve.responses.items import GivenItem, new_id
from gristmill.serve.sampling import SamplingFields, check_logprobs, sampling_params
from gristmill.serve.service import Service

MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}
LOGPROBS = "message.output_text.logprobs"


class TextFormat(msgspec.Struct, omit_defaults=True):
    """``text.format``."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct):
    """``text``."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(msgspec.Struct):
    """``reasoning``."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class GivenTool(msgspec.Struct):
    """A tool: a function, or by its type one that the server would run."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class AllowedTool(msgspec.Struct, omit_defaults=True):
    """A tool within ``tool_choice``."""

    name: str | None = None
    type: str | None = None


class ToolChoice(msgspec.Struct, omit_defaults=True):
    """``tool_choice`` as an object."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[AllowedTool] | None = None


class ResponsesRequest(SamplingFields, kw_only=True):
    """The body of /v1/responses."""

    input: str | list[GivenItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    tools: list[GivenTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the text comes with log-probabilities."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)


INCLUDABLE = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""What a request may ask for. All but the first belong to what this server does not make, and so have no effect."""


def check(request: ResponsesRequest) -> None:
    """ApiError: a field that this server does not serve, or a value outside its range."""
    for name in ("conversation", "prompt"):
        if getattr(request, name) is not None:
            raise ApiError(400, f"{name} is not supported: this server keeps no {name}s", param=name)
    if request.n not in (None, 1):
        raise ApiError(400, f"n must be 1 here, got {request.n}", param="n")
    if request.max_output_tokens is not None and request.max_output_tokens < 1:
        raise ApiError(
            400,
            f"max_output_tokens must be at least 1, got {request.max_output_tokens}",
            param="max_output_tokens",
        )
    check_logprobs("top_logprobs", request.top_logprobs)
    for name in request.include or ():
        if name not in INCLUDABLE:
            raise ApiError(400, f"include: {name!r} is none of {', '.join(INCLUDABLE)}", param="include")
    form = None if request.text is None else request.text.format
    if form is not None and form.type == "json_schema" and (not form.name or form.schema is None):
        raise ApiError(400, "text.format of type json_schema needs name and schema", param="text.format")
    metadata = request.metadata or {}
    if len(metadata) > MAX_METADATA or any(
        len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE for key, value in metadata.items()
    ):
        raise ApiError(
            400,
            f"metadata: at most {MAX_METADATA} entries, of {MAX_METADATA_KEY} characters for {MAX_METADATA_VALUE} characters",
            param="metadata",
        )


async def encoded(
    exchange: Exchange, request: ResponsesRequest, messages: list[Message], options: ChatOptions
) -> list[int]:
    """The token ids of a conversation."""
    service = exchange.service
    size = exchange.size + sum(len(message.content) for message in messages)  # earlier ones may be kept here
    ids: list[int] = await beside(size, service.chat.encode, messages, options)
    limit = service.max_model_len - (request.max_output_tokens or 1)
    if len(ids) > limit and request.truncation == "auto":
        ids = await beside(size, _truncated, service, messages, options, limit)
    return ids


def sampling(service: Service, request: ResponsesRequest, prompt_tokens: int) -> SamplingParams:
    """How tokens are chosen."""
    form = None if request.text is None else request.text.format
    if form is not None:
        request.response_format = msgspec.to_builtins(form)
    return sampling_params(
        service,
        request,
        max_tokens=room(service.max_model_len, prompt_tokens, request.max_output_tokens),
        logprobs=(request.top_logprobs or 0) if request.wants_logprobs else None,
    )


def options_of(service: Service, request: ResponsesRequest) -> ChatOptions:
    """How the conversation is continued."""
    functions = [_function(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or ())]
    given = request.tool_choice
    choice: str | dict[str, Any] | None
    if isinstance(given, ToolChoice):
        if given.type == "allowed_tools":
            functions = allowed_functions(functions, [one.name for one in given.tools or ()])
            choice = given.mode or "auto"
        elif given.type == "function":
            choice = {"name": given.name}
        else:
            raise ApiError(
                400,
                f"tool_choice of type {given.type!r} is not supported by this server",
                param="tool_choice",
            )
    else:
        choice = given
    effort = None if request.reasoning is None else request.reasoning.effort
    arguments = dict(request.chat_template_kwargs or {})
    thinking = arguments.pop("enable_thinking", None)
    return chat_options(
        service,
        functions,
        choice,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning=False if effort == "none" else thinking if isinstance(thinking, bool) else None,
        reasoning_effort=None if effort in (None, "none") else EFFORTS.get(effort, effort),
        template_arguments=arguments,
    )


def _function(given: GivenTool, place: str) -> GivenFunction:
    if given.type != "function":
        raise ApiError(
            400,
            f"{place}: tools of type {given.type!r} are not supported by this server; it takes functions",
            param=place,
        )
    if not given.name:
        raise ApiError(400, f"{place}.name is missing", param=f"{place}.name")
    return GivenFunction(given.name, given.description, given.parameters, given.strict)


def _truncated(service: Service, messages: Sequence[Message], options: ChatOptions, limit: int) -> list[int]:
    """The token ids without as many of the oldest messages as it takes. Instructions, and the last message, stay.

    The search takes a logarithm of their number of encodings. What is too long without them stays so.
    """
    oldest = [i for i, one in enumerate(messages) if one.role not in ("system", "developer")][:-1]

    def without(count: int) -> list[int]:
        dropped = set(oldest[:count])
        kept = [one for i, one in enumerate(messages) if i not in dropped]
        ids: list[int] = service.chat.encode(kept, options)
        return ids

    count = bisect.bisect_left(range(len(oldest)), True, key=lambda count: len(without(count)) <= limit)
    while count < len(oldest) and messages[oldest[count]].role == "tool":
        count += 1  # a result without its call
    return without(count)


def head(request: ResponsesRequest, model: str, params: SamplingParams) -> dict[str, Any]:
    """The response before its first part: what was asked, as it is understood."""
    choice, text, reasoning = request.tool_choice, request.text, request.reasoning
    shown = choice
    if isinstance(choice, ToolChoice):
        if choice.type == "allowed_tools" and choice.mode is None:
            choice.mode = "auto"
        shown = msgspec.to_builtins(choice)
    form = None if text is None or text.format is None else msgspec.to_builtins(text.format)
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": bool(request.background),
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "model": model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "temperature": params.temperature,
        "text": {
            "format": form or {"type": "text"},
            "verbosity": (text.verbosity if text else None) or "medium",
        },
        "tool_choice": shown or "auto",
        "tools": [msgspec.to_builtins(tool) for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": request.truncation or "disabled",
        "usage": None,
        "user": request.user,
        "metadata": request.metadata or {},
    }
