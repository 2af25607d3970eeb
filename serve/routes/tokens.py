"""Tokens without an engine: tokenize, detokenize, and requests rendered as prompts, as vLLM's server has them."""

from __future__ import annotations

from typing import Any

import msgspec

from gristmill.serve.app import Endpoint
from gristmill.serve.errors import ApiError
from gristmill.serve.exchange import Exchange
from gristmill.serve.generation import beside
from gristmill.serve.openai_messages import GivenMessage, GivenTool, chat_options, conversation
from gristmill.serve.routes.chat import ChatRequest, prepared
from gristmill.serve.routes.completions import CompletionRequest, token_prompts
from gristmill.serve.token_ids import check_ids


class TokenizeRequest(msgspec.Struct):
    """The body of /tokenize: a text, or a conversation."""

    prompt: str | None = None
    messages: list[GivenMessage] | None = None
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    tools: list[GivenTool] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct):
    """The body of /detokenize."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool = True


async def tokenize(exchange: Exchange) -> None:
    """Text to token ids."""
    request, service = await exchange.json(TokenizeRequest), exchange.service
    service.require_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "exactly one of prompt and messages is needed", param="prompt")
    if request.messages is not None:
        messages = conversation(request.messages)
        options = chat_options(
            service,
            [tool.function for tool in request.tools or ()],
            None,
            template_arguments=request.chat_template_kwargs or {},
            add_generation_prompt=request.add_generation_prompt,
            continue_final=request.continue_final_message,
        )
        ids = await beside(exchange.size, service.chat.encode, messages, options)
    else:
        prompt = request.prompt or ""
        ids = await beside(len(prompt), service.tokenizer.encode, prompt, request.add_special_tokens)
    texts = service.token_texts
    strings = None
    if request.return_token_strs:
        strings = await beside(len(ids), lambda: [texts.text_of(token) for token in ids])
    await exchange.respond(
        {
            "count": len(ids),
            "max_model_len": service.max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }
    )


async def detokenize(exchange: Exchange) -> None:
    """Token ids to text."""
    request, service = await exchange.json(DetokenizeRequest), exchange.service
    service.require_model(request.model)
    await check_ids(service, "tokens", request.tokens, "tokens")
    text = await beside(
        4 * len(request.tokens), service.tokenizer.decode, request.tokens, request.skip_special_tokens
    )
    await exchange.respond({"prompt": text})


async def render_chat(exchange: Exchange) -> None:
    """The prompt of a conversation, as text and as token ids, and its sampling."""
    request, service = await exchange.json(ChatRequest), exchange.service
    model = service.require_model(request.model)
    messages, options, ids, params = await prepared(exchange, request)
    params, _ = service.chat.reply(params, options, ids)
    text = await beside(exchange.size, service.chat.render, messages, options)
    await exchange.respond(
        {
            "model": model,
            "prompt": text,
            "prompt_token_ids": ids,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "stop_token_ids": list(params.stop_token_ids),
        }
    )


async def render_completion(exchange: Exchange) -> None:
    """The token ids of the prompts of a completion."""
    request, service = await exchange.json(CompletionRequest), exchange.service
    model = service.require_model(request.model)
    prompts = await token_prompts(service, request)
    await exchange.respond(
        {"model": model, "prompts": [{"prompt_token_ids": ids, "count": len(ids)} for ids in prompts]}
    )


ENDPOINTS = [
    Endpoint("POST", "/tokenize", tokenize),
    Endpoint("POST", "/detokenize", detokenize),
    Endpoint("POST", "/v1/chat/completions/render", render_chat),
    Endpoint("POST", "/v1/completions/render", render_completion),
    Endpoint("POST", "/render", render_chat),
]
