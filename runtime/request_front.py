"""The half of an engine that callers see: requests of any number of coroutines become outputs of an engine, and its outputs text."""

from __future__ import annotations

import asyncio
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

from gristmill.runtime.async_request import ActiveChoice, ActiveRequest, ActiveRequests, AsyncPrompts
from gristmill.runtime.completion import Chunk, Completion, GrowingChoices
from gristmill.runtime.errors import UsageError
from gristmill.runtime.grammars import Grammar
from gristmill.runtime.llm import Prompt
from gristmill.runtime.metrics import Metrics
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import RequestOutput
from gristmill.runtime.structured_output import StructuredOutput

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


class RequestFront(ABC):
    """Streams of an engine, which is in a thread of this process or in another process: an implementation adds and aborts requests there, and
    calls `_scheduled`, `_preempted` and `_deliver` for what comes from it, in one thread.

    Outputs are decoded in the caller's event loop, one wake-up per step.
    """

    def __init__(
        self,
        prompts: AsyncPrompts,
        requests: ActiveRequests,
        metrics: Metrics | None,
        tracer: Tracer | None,
    ) -> None:
        self._prompts, self._requests = prompts, requests
        self._metrics, self._tracer = metrics, tracer
        self._numbers = itertools.count()

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
        whole: bool = False,
    ) -> AsyncGenerator[Chunk, None]:
        """Stream one prompt in chunks, those of its n completions as they come; leaving the iterator aborts the request.

        Args:
            prompt: text, or token ids that are used unchanged.
            params: None = greedy, 128 tokens.
            priority: lower values first, in an engine made with queue_order="priority".
            request_id: a name for `abort` and traces; None = one is made.
            whole: one chunk for each completion, at its end, for who reads nothing before: it spares the host a chunk for every token. Those
                with stop strings come in several.

        Raises:
            UsageError, RequestTooLarge, QueueFull, EngineDraining: as `Engine.add_request`; a request_id in use.
            EngineDeadError: a step failed or did not end, or the engine was closed.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise UsageError(f"params must be a SamplingParams, got {type(params).__name__}")
        name = f"async-{next(self._numbers)}" if request_id is None else request_id
        ids = await self._prompts.encode(prompt)
        choice_params = self._prompts.params(params)
        grammars = await self._prompts.grammars(params)
        request = ActiveRequest(
            asyncio.get_running_loop(),
            name,
            len(ids),
            params,
            self._prompts.streams(params, ids),
            self._id(name),
            whole=whole,
        )
        self._requests.register(request)
        try:
            if self._tracer is not None:
                from gristmill.runtime.tracing import RequestSpan  # which needs opentelemetry

                request.span = RequestSpan(self._tracer, name, len(ids), params)
            await self._add(request, ids, choice_params, grammars, params.structured_output, priority)
            while (chunk := await request.next()) is not None:
                yield chunk
        except BaseException as error:
            if request.span is not None and not isinstance(error, GeneratorExit):
                request.span.failed(error)
            raise
        finally:
            self._leave(request)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
    ) -> list[Completion]:
        """The n completions of one prompt, in order of their choice. Arguments and errors are those of `stream`; being cancelled
        aborts the request."""
        ids = await self._prompts.encode(prompt)
        return await GrowingChoices().of(
            self.stream(ids, params, priority=priority, request_id=request_id, whole=True), ids
        )

    @abstractmethod
    async def _add(
        self,
        request: ActiveRequest,
        ids: Sequence[int],
        params: Sequence[SamplingParams],
        grammars: Sequence[Grammar | None],
        structured_output: StructuredOutput | None,
        priority: int,
    ) -> None:
        """Add all completions of a prompt, or none; the errors of `stream` are raised here, or by `ActiveRequest.fail`."""

    @abstractmethod
    def _abort(self, ids: Sequence[str]) -> None:
        """End completions in the engine; nothing if it runs no more."""

    def _id(self, name: str) -> str:
        """The id of a request's first completion in the engine."""
        return name

    # In the thread that hears from the engine --------------------------------------------------------------------------

    def _scheduled(self, request: ActiveRequest, name: str, cached_tokens: int, launched: float) -> None:
        choice = request.open.get(name)
        if choice is None or choice.timing.scheduled is not None:
            return  # the caller has left, or it was preempted before
        choice.timing.scheduled = launched
        if self._metrics is not None:
            self._metrics.scheduled(choice.timing, cached_tokens)
        if request.span is not None:
            request.span.scheduled(choice.text.choice, cached_tokens)

    def _preempted(self, request: ActiveRequest, name: str) -> None:
        choice = request.open.get(name)
        if request.span is not None and choice is not None:
            request.span.preempted(choice.text.choice)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Send outputs to the event loops of their callers: one call for each loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[ActiveRequest, RequestOutput]]] = {}
        for output in outputs:
            if (request := self._requests.added(output.id)) is not None:
                by_loop.setdefault(request.loop, []).append((request, output))
        for loop, some in by_loop.items():
            try:
                loop.call_soon_threadsafe(self._receive, some)
            except RuntimeError:  # the loop was closed with its callers
                self._abort([output.id for _, output in some])
                for request, output in some:
                    self._requests.free(request, [output.id])

    # In the callers' event loops ---------------------------------------------------------------------------------------

    def _receive(self, outputs: list[tuple[ActiveRequest, RequestOutput]]) -> None:
        stopped: list[str] = []
        ended: list[tuple[ActiveRequest, str]] = []
        now, tokens = time.monotonic(), 0
        for request, output in outputs:
            choice = request.open.get(output.id)
            if choice is None:
                continue  # it ended by a stop string, or its caller has left
            if choice.text.keep(output):
                tokens += self._count(request, choice, len(output.new_ids), now)
                continue
            try:
                chunk = choice.text.push(output)
            except Exception as error:  # a tokenizer that cannot decode ends its own request alone
                request.fail(error)
                stopped += request.open
                continue
            if chunk.finish_reason is not None:
                del request.open[output.id]
                ended.append((request, output.id))
                if output.finish_reason is None:
                    stopped.append(output.id)
            # The chunk of a whole completion has tokens that were counted as they came.
            count = len(output.new_ids) if choice.text.whole else len(chunk.token_ids)
            tokens += self._count(request, choice, count, now)
            if chunk.finish_reason is not None:
                if self._metrics is not None:
                    self._metrics.ended(choice.timing, chunk.finish_reason)
                if request.span is not None:
                    request.span.finished(chunk)
            request.put(chunk)
        if tokens and self._metrics is not None:
            self._metrics.generated(tokens)
        if stopped:
            self._abort(stopped)
        for request, name in ended:
            self._requests.free(request, [name])

    def _count(self, request: ActiveRequest, choice: ActiveChoice, count: int, now: float) -> int:
        """Report new tokens of a completion; how many they are."""
        if self._metrics is not None:
            self._metrics.output(choice.timing, count, now)
        if request.span is not None:
            request.span.output(choice.text.choice, count)
        return count

    def _leave(self, request: ActiveRequest) -> None:
        """Drop everything that belongs to a request whose caller has left."""
        left = dict(request.open)
        request.open.clear()
        if self._metrics is not None and request.added:
            for choice in left.values():
                self._metrics.ended(choice.timing, "abort")
        if request.span is not None:
            request.span.end()
        if left:
            self._abort(list(left))
            self._requests.free(request, left)
