"""POST /v1/completions, as OpenAI's API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from gristmill.runtime.completion import Chunk
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import TokenLogprobs
from gristmill.serve.app import Endpoint
from gristmill.serve.encoding import encode
from gristmill.serve.errors import ApiError
from gristmill.serve.exchange import Exchange
from gristmill.serve.generation import Answer, Generation, Part, beside, room, shortened
from gristmill.serve.logprobs import completion_logprobs, prompt_logprobs
from gristmill.serve.sampling import SamplingFields, check_choices, check_logprobs, sampling_params
from gristmill.serve.service import Service
from gristmill.serve.token_ids import check_ids
from gristmill.serve.token_text import TextOffsets
from gristmill.serve.usage import end_of_stream, usage

DEFAULT_TOKENS = 16
"""max_tokens of a request without one: OpenAI's."""


class CompletionRequest(SamplingFields, kw_only=True):
    """The body."""

    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None

    @property
    def only_prompt(self) -> bool:
        """Nothing is generated; the prompt is shown."""
        return bool(self.echo and self.max_tokens == 0)

    @property
    def wanted(self) -> int:
        """The tokens that the engine generates for each completion, if there is room."""
        return 1 if self.only_prompt else DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens


async def token_prompts(service: Service, request: CompletionRequest) -> list[list[int]]:
    """The token ids of each prompt."""
    given: Any = request.prompt
    kinds = set() if isinstance(given, str) else await beside(len(given), _kinds, given)
    one_prompt = kinds <= {int}
    many = [given] if one_prompt else given
    if not one_prompt and int in kinds:
        raise ApiError(400, "prompt is a text, token ids, or a list of such: not a mixture", param="prompt")
    check_choices(service, request, len(many))
    prompts: list[list[int]] = []
    for one in many:
        if isinstance(one, str):
            special = request.add_special_tokens is not False
            ids = await beside(len(one), service.tokenizer.encode, one, special)
        else:
            ids = one
            await check_ids(service, "prompt", ids, "prompt")
        ids = shortened(service.max_model_len, ids, request.truncate_prompt_tokens, request.wanted)
        if not ids:
            raise ApiError(400, "the prompt is empty: at least one token is needed", param="prompt")
        prompts.append(ids)
    return prompts


def _kinds(given: Sequence[object]) -> set[type]:
    return {type(one) for one in given}


def _params(
    service: Service, request: CompletionRequest, prompts: Sequence[Sequence[int]]
) -> list[SamplingParams]:
    if request.suffix:
        raise ApiError(400, "suffix is not supported by this model", param="suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise ApiError(400, "best_of is not supported; use n", param="best_of")
    check_logprobs("logprobs", request.logprobs)
    if request.echo and request.logprobs is not None and request.prompt_logprobs is None:
        request.prompt_logprobs = request.logprobs
    return [
        sampling_params(
            service,
            request,
            max_tokens=room(service.max_model_len, len(ids), request.wanted),
            logprobs=request.logprobs,
        )
        for ids in prompts
    ]


class Several:
    """The completions of several prompts: choice i of prompt p is the choice p * n + i of the answer."""

    def __init__(self, exchange: Exchange, request: CompletionRequest, prompts: list[list[int]]) -> None:
        service = exchange.service
        self.n = request.n or 1
        self.prompts = prompts
        self.generations = [
            Generation(
                exchange,
                ids,
                params,
                priority=request.priority or 0,
                name=f"{exchange.request_id}.{number}" if number else exchange.request_id,
                interval_ms=request.stream_interval_ms,
                whole=not request.stream,
                counted=not request.only_prompt,
            )
            for number, (ids, params) in enumerate(
                zip(prompts, _params(service, request, prompts), strict=True)
            )
        ]

    async def parts(self) -> AsyncGenerator[tuple[int, Part], None]:
        """(choice of the answer, part), of all prompts as they come."""
        if len(self.generations) == 1:
            async with aclosing(self.generations[0].parts()) as parts:
                async for part in parts:
                    yield part.choice, part
            return
        arrived: asyncio.Queue[tuple[int, Part] | BaseException | None] = asyncio.Queue(64)

        async def forward(number: int) -> None:
            try:
                async with aclosing(self.generations[number].parts()) as parts:
                    async for part in parts:
                        await arrived.put((number * self.n + part.choice, part))
                await arrived.put(None)
            except Exception as error:
                await arrived.put(error)

        tasks = [asyncio.ensure_future(forward(number)) for number in range(len(self.generations))]
        left = len(tasks)
        try:
            while left:
                item = await arrived.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def completions(exchange: Exchange) -> None:
    """Answer, whole or as a stream."""
    request = await exchange.json(CompletionRequest)
    service = exchange.service
    service.require_engine()
    model = service.require_model(request.model)
    prompts = await token_prompts(service, request)
    several = Several(exchange, request, prompts)
    exchange.watch()
    head = {
        "id": f"cmpl-{exchange.request_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
    }
    if request.stream:
        exchange.streams = True
        await _stream(exchange, request, several, head)
        return
    joined = [Answer() for _ in range(len(prompts) * several.n)]
    async for index, part in several.parts():
        joined[index].add(part)
    choices = [
        _choice(
            service,
            request,
            index,
            prompts[index // several.n],
            answer,
            _of_prompt(joined[index - index % several.n].chunks),
        )
        for index, answer in enumerate(joined)
    ]
    exchange.record["finish"] = [answer.finish for answer in joined]
    await exchange.respond(
        head
        | {
            "choices": choices,
            "usage": usage(*several.generations),
            "system_fingerprint": service.fingerprint,
        }
    )


def _of_prompt(chunks: Sequence[Chunk]) -> Sequence[TokenLogprobs | None] | None:
    """The log-probabilities of a prompt, which the first of its completions has; None = not known."""
    return next((chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs is not None), None)


def _choice(
    service: Service,
    request: CompletionRequest,
    index: int,
    prompt: Sequence[int],
    answer: Answer,
    given: Sequence[TokenLogprobs | None] | None,
) -> dict[str, Any]:
    ids = [] if request.only_prompt else [token for chunk in answer.chunks for token in chunk.token_ids]
    text = "" if request.only_prompt else answer.message.content
    before = service.tokenizer.decode(prompt) if request.echo else ""
    logprobs = None
    if request.logprobs is not None:
        entries: list[Any] = (
            [] if request.only_prompt else [e for chunk in answer.chunks for e in chunk.logprobs or ()]
        )
        shown = list(ids)
        offsets = service.text_offsets(request.skip_special_tokens, len(before), prompt).push(ids)
        if request.echo:
            entries = [*(given or [None] * len(prompt)), *entries]
            shown = [*prompt, *ids]
            offsets = [*service.text_offsets().push(prompt), *offsets]
        logprobs = completion_logprobs(service, entries, shown[: len(entries)], offsets[: len(entries)])
    choice = {
        "index": index,
        "text": before + text,
        "logprobs": logprobs,
        "finish_reason": "length" if request.only_prompt else answer.finish,
        "stop_reason": answer.chunks[-1].stop_reason,
        "prompt_logprobs": prompt_logprobs(service, answer.chunks),
    }
    if request.return_token_ids:
        choice |= {"token_ids": ids, "prompt_token_ids": list(prompt)}
    return choice


async def _stream(
    exchange: Exchange, request: CompletionRequest, several: Several, head: dict[str, Any]
) -> None:
    options = request.stream_options
    each = bool(options and options.continuous_usage_stats)
    before = b"data: " + encode(head)[:-1] + b',"choices":['
    plain = not (each or request.logprobs is not None or request.return_token_ids)
    offsets: dict[int, TextOffsets] = {}
    given: dict[int, Sequence[TokenLogprobs | None] | None] = {}  # by prompt
    reasons: list[str] = []
    service = exchange.service
    async for index, part in several.parts():
        await exchange.start_events()
        out = []
        number = index // several.n
        if index not in offsets:
            begin = 0
            if request.echo:
                given[number] = given.get(number) or part.chunk.prompt_logprobs
                echo = _echo(service, request, index, several.prompts[number], given[number])
                begin = len(echo["text"])
                out.append(b"%b%b]}\n\n" % (before, encode(echo)))
            offsets[index] = service.text_offsets(request.skip_special_tokens, begin, several.prompts[number])
        if request.only_prompt:
            pass
        elif plain and part.finish is None:
            if part.delta.content:
                out.append(
                    b'%b{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}]}\n\n'
                    % (before, index, encode(part.delta.content))
                )
        else:
            choice: dict[str, Any] = {
                "index": index,
                "text": part.delta.content,
                "logprobs": None,
                "finish_reason": part.finish,
            }
            ids = part.chunk.token_ids
            if request.logprobs is not None:
                places = offsets[index].push(ids)
                choice["logprobs"] = completion_logprobs(service, part.chunk.logprobs or (), ids, places)
            if part.finish is not None:
                choice["stop_reason"] = part.chunk.stop_reason
            if request.return_token_ids:
                choice["token_ids"] = list(ids)
            tail = b',"usage":' + encode(usage(*several.generations)) if each else b""
            out.append(b"%b%b]%b}\n\n" % (before, encode(choice), tail))
        if part.finish is not None:
            reasons.append(part.finish)
        if out:
            await exchange.write(b"".join(out))
    exchange.record["finish"] = reasons
    await exchange.end(end_of_stream(before, options, *several.generations))


def _echo(
    service: Service,
    request: CompletionRequest,
    index: int,
    prompt: Sequence[int],
    given: Sequence[TokenLogprobs | None] | None,
) -> dict[str, Any]:
    """The prompt as the first part of a stream."""
    logprobs = None
    if request.logprobs is not None:
        entries = given or [None] * len(prompt)
        logprobs = completion_logprobs(service, entries, prompt, service.text_offsets().push(prompt))
    return {
        "index": index,
        "text": service.tokenizer.decode(prompt),
        "logprobs": logprobs,
        "finish_reason": "length" if request.only_prompt else None,
    }


ENDPOINTS = [Endpoint("POST", "/v1/completions", completions)]
