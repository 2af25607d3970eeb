"""POST /v1/chat/completions, as OpenAI's API."""

from __future__ import annotations

import time
from typing import Any

from gristmill.runtime.chat.conversation import CallDelta, ChatOptions, Message
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.serve.app import Endpoint
from gristmill.serve.encoding import encode
from gristmill.serve.errors import ApiError
from gristmill.serve.exchange import Exchange
from gristmill.serve.generation import Answer, Generation, Part, answers, beside, continued, room, shortened
from gristmill.serve.logprobs import chat_logprobs, prompt_logprobs
from gristmill.serve.openai_messages import GivenMessage, GivenTool, chat_options, conversation
from gristmill.serve.sampling import SamplingFields, check_logprobs, sampling_params
from gristmill.serve.service import Service
from gristmill.serve.usage import end_of_stream, usage


class ChatRequest(SamplingFields, kw_only=True):
    """The body."""

    messages: list[GivenMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[GivenTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    truncate_prompt_tokens: int | None = None


async def prepared(
    exchange: Exchange, request: ChatRequest
) -> tuple[list[Message], ChatOptions, list[int], SamplingParams]:
    """(conversation, how it is continued, token ids, sampling without what the model's format needs)."""
    service = exchange.service
    messages = conversation(request.messages)
    arguments = dict(request.chat_template_kwargs or {})
    thinking = arguments.pop("enable_thinking", None)
    options = chat_options(
        service,
        [tool.function for tool in request.tools or ()],
        request.tool_choice,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning=False
        if request.reasoning_effort == "none"
        else thinking
        if isinstance(thinking, bool)
        else None,
        reasoning_effort=None if request.reasoning_effort == "none" else request.reasoning_effort,
        template_arguments=arguments,
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final=bool(request.continue_final_message),
    )
    ids = await beside(exchange.size, service.chat.encode, messages, options)
    wanted = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    ids = shortened(service.max_model_len, ids, request.truncate_prompt_tokens, wanted)
    logprobs = None
    if request.logprobs:
        logprobs = request.top_logprobs or 0
        check_logprobs("top_logprobs", logprobs)
    elif request.top_logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    params = sampling_params(
        service, request, max_tokens=room(service.max_model_len, len(ids), wanted), logprobs=logprobs
    )
    return messages, options, ids, params


async def chat(exchange: Exchange) -> None:
    """Answer, whole or as a stream."""
    request = await exchange.json(ChatRequest)
    service = exchange.service
    service.require_engine()
    model = service.require_model(request.model)
    _, options, ids, params = await prepared(exchange, request)
    exchange.watch()
    generation = continued(
        exchange, options, ids, params, priority=request.priority, interval_ms=request.stream_interval_ms
    )
    head = {
        "id": f"chatcmpl-{exchange.request_id}",
        "object": "chat.completion.chunk" if request.stream else "chat.completion",
        "created": int(time.time()),
        "model": model,
    }
    if request.stream:
        exchange.streams = True
        await _stream(exchange, request, generation, head)
        return
    joined = await answers(generation, params.n)
    choices = [_choice(service, request, index, answer) for index, answer in enumerate(joined)]
    exchange.record["finish"] = [answer.finish for answer in joined]
    await exchange.respond(
        head
        | {
            "choices": choices,
            "usage": usage(generation),
            "service_tier": None,
            "system_fingerprint": service.fingerprint,
            "prompt_logprobs": prompt_logprobs(service, joined[0].chunks),
        }
        | ({"prompt_token_ids": ids} if request.return_token_ids else {})
    )


def _choice(service: Service, request: ChatRequest, index: int, answer: Answer) -> dict[str, Any]:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.message.calls
    ]
    content = answer.message.content
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content if content or not calls else None,
        "refusal": None,
    }
    if calls:
        message["tool_calls"] = calls
    if (thoughts := answer.message.reasoning) and request.include_reasoning is not False:
        message["reasoning_content"] = message["reasoning"] = thoughts
    last = answer.chunks[-1]
    choice = {
        "index": index,
        "message": message,
        "logprobs": chat_logprobs(service, answer.chunks) if request.logprobs else None,
        "finish_reason": answer.finish,
        "stop_reason": last.stop_reason,
    }
    if request.return_token_ids:
        choice["token_ids"] = [token for chunk in answer.chunks for token in chunk.token_ids]
    return choice


async def _stream(
    exchange: Exchange, request: ChatRequest, generation: Generation, head: dict[str, Any]
) -> None:
    """Server-sent events. Most are a text between two constant parts, which are encoded once."""
    options = request.stream_options
    each = bool(options and options.continuous_usage_stats)
    before = encode(head)[:-1] + b',"choices":['
    plain = not (each or request.logprobs or request.return_token_ids)
    begun: set[int] = set()
    reasons: list[str] = []
    show_thoughts = request.include_reasoning is not False
    async for part in generation.parts():
        await exchange.start_events()
        out = []
        if part.choice not in begun:
            begun.add(part.choice)
            out.append(
                b"data: %b%b]}\n\n"
                % (
                    before,
                    b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
                    % part.choice,
                )
            )
        delta = part.delta
        if plain and part.finish is None and not delta.calls and not delta.reasoning:
            if delta.content:
                out.append(
                    b'data: %b{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}]}\n\n'
                    % (before, part.choice, encode(delta.content))
                )
        else:
            choice = _delta(exchange.service, request, part, show_thoughts)
            if choice is not None:
                tail = b',"usage":' + encode(usage(generation)) if each else b""
                out.append(b"data: %b%b]%b}\n\n" % (before, encode(choice), tail))
        if part.finish is not None:
            reasons.append(part.finish)
        if out:
            await exchange.write(b"".join(out))
    exchange.record["finish"] = reasons
    await exchange.end(end_of_stream(b"data: " + before, options, generation))


def _delta(service: Service, request: ChatRequest, part: Part, thoughts: bool) -> dict[str, Any] | None:
    delta = part.delta
    added: dict[str, Any] = {}
    if delta.content:
        added["content"] = delta.content
    if delta.reasoning and thoughts:
        added["reasoning_content"] = added["reasoning"] = delta.reasoning
    if delta.calls:
        added["tool_calls"] = [_call(call) for call in delta.calls]
    tokens = part.chunk.token_ids
    if not added and part.finish is None and not (tokens and (request.logprobs or request.return_token_ids)):
        return None
    choice: dict[str, Any] = {
        "index": part.choice,
        "delta": added,
        "logprobs": chat_logprobs(service, [part.chunk]) if request.logprobs else None,
        "finish_reason": part.finish,
    }
    if part.finish is not None:
        choice["stop_reason"] = part.chunk.stop_reason
    if request.return_token_ids:
        choice["token_ids"] = list(tokens)
    return choice


def _call(call: CallDelta) -> dict[str, Any]:
    if call.id:
        return {
            "index": call.index,
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
    return {"index": call.index, "function": {"arguments": call.arguments}}


ENDPOINTS = [Endpoint("POST", "/v1/chat/completions", chat)]
