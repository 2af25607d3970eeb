"""A prompt that is being completed for a client: the engine's chunks as parts of messages, with what they used."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gristmill.runtime.chat.answer import GrowingMessage, parsed
from gristmill.runtime.chat.conversation import ChatOptions, Delta
from gristmill.runtime.completion import Chunk
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.tokenizer import LONG_TEXT
from gristmill.serve.errors import ApiError, failed, unavailable
from gristmill.serve.exchange import Exchange

if TYPE_CHECKING:
    from gristmill.runtime.chat.formats import OutputParser


@dataclass(slots=True)
class Part:
    """What a step added to one completion.

    Attributes:
        delta: what it added to the message; its `content` alone where nothing is parsed.
        finish: why the completion ended: ``stop``, ``length``, ``tool_calls``; None = it goes on.
        chunk: the engine's chunk.
    """

    choice: int
    delta: Delta
    finish: str | None
    chunk: Chunk


class Generation:
    """One prompt, its completions, and what they have used so far.

    Args:
        parser: makes the parser of one completion; None = text is passed on as it comes.
        priority: lower values first, with ``queue_order="priority"``.
        name: of the request in the engine, if no other has it.
        counted: its output is a part of the answer; False = the prompt alone is.
        whole: as of `AsyncEngine.stream`, without a parser, which counts the tokens of thoughts by chunks.

    Attributes:
        prompt_tokens, output_tokens, reasoning_tokens, cached_tokens: counts so far.
    """

    def __init__(
        self,
        exchange: Exchange,
        ids: Sequence[int],
        params: SamplingParams,
        parser: Callable[[], OutputParser] | None = None,
        *,
        priority: int = 0,
        name: str | None = None,
        interval_ms: float | None = None,
        whole: bool = False,
        counted: bool = True,
    ) -> None:
        self._counted = counted
        self._exchange, self._ids, self._params = exchange, ids, params
        self._whole = whole
        self._parsers = None if parser is None else [parser() for _ in range(params.n)]
        self._priority = priority
        self._name = exchange.request_id if name is None else name
        service = exchange.service
        self._interval = (service.config.stream_interval_ms if interval_ms is None else interval_ms) / 1e3
        self._engine = service.require_engine()
        self.prompt_tokens = len(ids)
        self.output_tokens = self.cached_tokens = 0

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of thoughts."""
        return sum(parser.reasoning_tokens for parser in self._parsers or ())

    async def parts(self) -> AsyncGenerator[Part, None]:
        """The parts as they come. ApiError: a completion failed, or the server ended it; the engine's errors as they are."""
        begin = time.monotonic()
        record = self._exchange.record
        record["prompt_tokens"] = record.get("prompt_tokens", 0) + self.prompt_tokens
        first = True
        parsers = self._parsers
        name = self._own_name()
        names = self._exchange.service.in_engine
        names.add(name)
        stream = self._engine.stream(
            self._ids, self._params, priority=self._priority, request_id=name, whole=self._whole
        )
        try:
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    self.output_tokens += len(chunk.token_ids) if self._counted else 0
                    if not chunk.choice:  # the others find what the first has computed
                        self.cached_tokens = max(self.cached_tokens, chunk.cached_tokens)
                    if first:
                        first = False
                        begun = time.monotonic() if chunk.begun is None else chunk.begun
                        record.setdefault("first_token_seconds", round(begun - begin, 6))
                    finish = chunk.finish_reason
                    if finish == "error":
                        raise failed(chunk.error)
                    ended = finish == "abort"  # no API has a word for it
                    if ended:
                        finish = None
                    if parsers is None:
                        yield Part(chunk.choice, Delta(chunk.text), finish, chunk)
                    else:
                        part = parsed(parsers[chunk.choice], chunk)
                        yield Part(chunk.choice, part.delta, None if ended else part.finish_reason, chunk)
                    if ended:
                        raise unavailable("the server ended the request before it was complete", "aborted")
                    if self._interval and finish is None:
                        await asyncio.sleep(self._interval)  # what comes meanwhile is one chunk
        finally:
            names.discard(name)
            record["output_tokens"] = record.get("output_tokens", 0) + self.output_tokens

    def _own_name(self) -> str:
        """A name that no other request in the engine has: clients send the same X-Request-Id with several requests of one task."""
        names, name, number = self._exchange.service.in_engine, self._name, 1
        while name in names:
            number += 1
            name = f"{self._name}~{number}"
        return name


def continued(
    exchange: Exchange,
    options: ChatOptions,
    ids: Sequence[int],
    params: SamplingParams,
    *,
    priority: int | None,
    interval_ms: float | None,
) -> Generation:
    """The continuation of a conversation, whose token ids are given. Arguments as of `Generation`; `params` without what the format needs."""
    params, parser = exchange.service.chat.reply(params, options, ids)
    return Generation(
        exchange,
        ids,
        params,
        parser,
        priority=priority or 0,
        interval_ms=interval_ms,
    )


@dataclass(slots=True)
class Answer:
    """The parts of one completion, joined: streamed or not, an answer is the same."""

    message: GrowingMessage = field(default_factory=GrowingMessage)
    finish: str | None = None
    chunks: list[Chunk] = field(default_factory=list)

    def add(self, part: Part) -> None:
        """The next part."""
        self.message.add(part.delta)
        if part.finish is not None:
            self.finish = part.finish
        self.chunks.append(part.chunk)


async def answers(generation: Generation, count: int) -> list[Answer]:
    """All parts of the `count` completions of a prompt."""
    joined = [Answer() for _ in range(count)]
    async for part in generation.parts():
        joined[part.choice].add(part)
    return joined


async def beside(size: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments): in a thread, beside the streams of others, if what it works on is large, by characters, bytes or tokens."""
    if size < LONG_TEXT:
        return function(*arguments)
    return await asyncio.to_thread(function, *arguments)


def room(service_limit: int, prompt_tokens: int, wanted: int | None) -> int:
    """The output tokens of a request: what is wanted, as far as there is room. ApiError: the prompt leaves none."""
    left = service_limit - prompt_tokens
    if left < 1:
        raise ApiError(
            400,
            # Clients look for the first words.
            f"This model's maximum context length is {service_limit} tokens of prompt and output; the prompt has {prompt_tokens}",
            code="context_length_exceeded",
        )
    if wanted is not None and wanted < 1:
        raise ApiError(400, f"max_tokens must be at least 1, got {wanted}", param="max_tokens")
    return left if wanted is None else min(wanted, left)


def shortened(service_limit: int, ids: list[int], keep: int | None, wanted: int | None) -> list[int]:
    """The last tokens of a prompt, as vLLM's truncate_prompt_tokens asks for them. ApiError: a number that means nothing.

    Args:
        keep: how many; -1 = as many as leave room for the output; None = all.
        wanted: the output tokens of the request.
    """
    if keep is None:
        return ids
    if keep != -1 and not 1 <= keep <= service_limit:
        raise ApiError(
            400,
            f"truncate_prompt_tokens must be 1 to {service_limit}, the length that the model takes, or -1, as many tokens as leave room "
            f"for the output; got {keep}",
            param="truncate_prompt_tokens",
        )
    return ids[-(keep if keep > 0 else max(1, service_limit - max(1, wanted or 1))) :]
