"""Requests of an `AsyncEngine`: the unfinished completions of each call, what its caller has not taken yet, and the preparation of prompts and
parameters, in the caller's event loop or, where that takes long, in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gristmill.runtime.completion import Chunk, GrowingCompletion, TextOutput, engine_params, text_stream
from gristmill.runtime.engine_thread import EngineDeadError
from gristmill.runtime.errors import UsageError
from gristmill.runtime.grammars import Grammar
from gristmill.runtime.integers import as_prompt
from gristmill.runtime.llm import LLM, Prompt
from gristmill.runtime.metrics import Timing
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import QueueFull
from gristmill.runtime.tokenizer import TextStream, Tokenizer

if TYPE_CHECKING:
    from gristmill.runtime.tracing import RequestSpan


@dataclass(slots=True)
class ActiveChoice:
    """One completion that has not ended."""

    text: TextOutput
    timing: Timing


class ActiveRequest:
    """The completions of one prompt, used in one event loop. `first` is the engine's id of the first one; `whole` as of `TextOutput`.

    Attributes:
        open: the completions that have not ended, by the engine's id; the engine's thread reads it too.
        ids: those of all completions.
        added: whether the engine has taken the request; set in the engine's thread.
        on_the_way: how many completions are registered and not yet given to the engine.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        name: str,
        prompt_tokens: int,
        params: SamplingParams,
        streams: Sequence[TextStream | None],
        first: str,
        *,
        whole: bool = False,
    ) -> None:
        self.loop = loop
        self.name = name
        self.open = {
            f"{first}/{choice}" if choice else first: ActiveChoice(
                TextOutput(0, choice, params, stream, whole=whole), Timing(prompt_tokens)
            )
            for choice, stream in enumerate(streams)
        }
        self.ids = tuple(self.open)
        self.added = False
        self.on_the_way = 0
        self.span: RequestSpan | None = None
        self._untaken: dict[int, Chunk | GrowingCompletion] = {}  # by choice: what the caller has not taken
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = (
            None  # of `next`; an asyncio.Event takes three times as long
        )

    def put(self, chunk: Chunk) -> None:
        """Another chunk, for `next`."""
        before = self._untaken.get(chunk.choice)
        if before is None:
            self._untaken[chunk.choice] = chunk
        elif isinstance(before, Chunk):
            self._untaken[chunk.choice] = growing = GrowingCompletion()
            growing.add(before)
            growing.add(chunk)
        else:
            before.add(chunk)
        self._wake()

    def fail(self, error: BaseException) -> None:
        """`next` raises this when it has handed out what there is."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def next(self) -> Chunk | None:
        """What was added to one completion since the last call, as one chunk; None at the end. What came before a failure is
        returned first, then the failure is raised."""
        while not self._untaken:
            if self._error is not None:
                # One death has many callers: each gets an exception of its own.
                if isinstance(self._error, EngineDeadError):
                    raise EngineDeadError(str(self._error)) from self._error.__cause__
                raise self._error
            if not self.open:
                return None
            self._waiter = self.loop.create_future()
            await self._waiter
        chunk = self._untaken.pop(next(iter(self._untaken)))
        return chunk if isinstance(chunk, Chunk) else chunk.chunk()


class ActiveRequests:
    """The unfinished requests of all event loops, by the ids that the engine has for their completions. For any thread.

    An id is free again only when the end of its request has been queued for the engine or has come from it: a later request with
    the same id is added after that, and nothing that was meant for the first one reaches it.

    Args:
        waiting: returns the number of requests that wait in the engine.
        max_queued: the most requests that may wait there and on the way to it; None = any number.
    """

    def __init__(self, waiting: Callable[[], int], max_queued: int | None) -> None:
        self._waiting, self._max_queued = waiting, max_queued
        self._lock = threading.Lock()
        self._by_id: dict[str, ActiveRequest] = {}
        self._on_the_way = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def register(self, request: ActiveRequest) -> None:
        """Take the ids of a request, all of them or none.

        Raises:
            UsageError: one is in use.
            QueueFull: too many requests wait.
        """
        count = len(request.open)
        with self._lock:
            if any(id_ in self._by_id for id_ in request.open):
                raise UsageError(f"request id {request.name!r} is in use by an unfinished request")
            waiting, most = self._waiting() + self._on_the_way, self._max_queued
            if most is not None and waiting + count > most:
                more = "which" if waiting >= most else f"with its {count} completions more than {most}, which"
                raise QueueFull(
                    f"request {request.name!r} refused: {waiting} requests are waiting, {more} is max_queued"
                )
            self._by_id.update(dict.fromkeys(request.open, request))
            request.on_the_way = count
            self._on_the_way += count

    def arrived(self, request: ActiveRequest) -> None:
        """The engine gets the request now."""
        with self._lock:
            self._arrived(request)

    def _arrived(self, request: ActiveRequest) -> None:
        self._on_the_way -= request.on_the_way
        request.on_the_way = 0

    def free(self, request: ActiveRequest, ids: Iterable[str]) -> None:
        """Give ids of a request back."""
        with self._lock:
            self._arrived(request)
            for id_ in ids:
                if self._by_id.get(id_) is request:
                    del self._by_id[id_]

    def added(self, id_: str) -> ActiveRequest | None:
        """The request with a completion of this id in the engine; None if its caller has left. For the engine's thread."""
        request = self._by_id.get(id_)
        return request if request is not None and request.added else None

    def ids(self, name: str) -> list[str]:
        """The ids of the request with this name; [] if there is none."""
        with self._lock:
            return [id_ for id_, request in self._by_id.items() if request.name == name]

    def all(self) -> set[ActiveRequest]:
        """Every unfinished request."""
        with self._lock:
            return set(self._by_id.values())


LONG_TEXT = 4096
"""Prompts of at least this many characters are encoded outside the event loop's thread."""


NO_TOKENIZER = "an AsyncEngine of an Engine has no tokenizer: make it with an LLM to serve text"


class AsyncPrompts:
    """From text to token ids and back.

    Args:
        tokenizer: returns it, or raises NoTokenizerError; None = token ids only, and a UsageError for text.
        compile_grammars: as `LLM.compile_grammars`; None = that is done elsewhere.
    """

    def __init__(
        self,
        tokenizer: Callable[[], Tokenizer] | None,
        compile_grammars: Callable[[SamplingParams], list[Grammar | None]] | None,
    ) -> None:
        self._given, self._compile = tokenizer, compile_grammars

    @classmethod
    def of(cls, llm: LLM) -> AsyncPrompts:
        """By the tokenizer and the grammars of a model."""
        return cls(lambda: llm.tokenizer, llm.compile_grammars)

    async def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt."""
        given = as_prompt(prompt)
        if not isinstance(given, str):
            return given
        tokenizer = self._tokenizer()
        if len(given) < LONG_TEXT:
            return tokenizer.encode(given)
        return await asyncio.to_thread(tokenizer.encode, given)

    async def grammars(self, params: SamplingParams) -> list[Grammar | None]:
        """A grammar for each completion; None where anything may come out, or where they are compiled elsewhere."""
        if params.structured_output is None or self._compile is None:
            return [None] * params.n
        return await asyncio.to_thread(self._compile, params)

    def params(self, params: SamplingParams) -> list[SamplingParams]:
        """The parameters of each completion, as the engine takes them."""
        return [engine_params(params, choice, self._tokenizer) for choice in range(params.n)]

    def streams(self, params: SamplingParams, prompt: Sequence[int]) -> list[TextStream | None]:
        """A decoder for each completion of a prompt; None without a tokenizer."""
        if self._given is None and not params.stop:
            return [None] * params.n
        return [text_stream(self._tokenizer, params, prompt) for _ in range(params.n)]

    def _tokenizer(self) -> Tokenizer:
        if self._given is None:
            raise UsageError(NO_TOKENIZER)
        return self._given()
