"""A request as an OpenTelemetry span, with the attributes of its semantic conventions for generative AI."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.trace import SpanKind, StatusCode

from gristmill.runtime.completion import Chunk
from gristmill.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


class RequestSpan:
    """A span from arrival to the last chunk, under the span that is current when it is made.

    Events: SCHEDULED, FIRST_TOKEN, PREEMPTED, FINISHED (with its finish_reason, and its error if it failed), each with the index of its completion.
    """

    def __init__(self, tracer: Tracer, request_id: str, prompt_tokens: int, params: SamplingParams) -> None:
        self._tokens = 0
        self._begun: set[int] = set()
        self._span = tracer.start_span(
            "llm_request",
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.request.id": request_id,
                "gen_ai.request.max_tokens": params.max_tokens,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.request.choice.count": params.n,
                "gen_ai.usage.input_tokens": prompt_tokens,
            },
        )

    def scheduled(self, choice: int, cached_tokens: int) -> None:
        """The completion is in a step for the first time, with this many tokens of the prompt found in the prefix cache."""
        self._span.add_event("SCHEDULED", {"choice": choice, "cached_tokens": cached_tokens})

    def preempted(self, choice: int) -> None:
        """The completion has lost its blocks, and waits again."""
        self._span.add_event("PREEMPTED", {"choice": choice})

    def output(self, choice: int, count: int) -> None:
        """So many tokens of a completion have arrived."""
        if count and choice not in self._begun:
            self._begun.add(choice)
            self._span.add_event("FIRST_TOKEN", {"choice": choice})
        self._tokens += count

    def finished(self, chunk: Chunk) -> None:
        """The last chunk of a completion has arrived."""
        cause = {} if chunk.error is None else {"error": str(chunk.error)}
        self._span.add_event(
            "FINISHED", {"choice": chunk.choice, "finish_reason": str(chunk.finish_reason), **cause}
        )

    def failed(self, error: BaseException) -> None:
        """The caller gets this exception."""
        self._span.record_exception(error)
        self._span.set_status(StatusCode.ERROR, str(error))

    def end(self) -> None:
        """The request is complete, or the caller has left."""
        self._span.set_attribute("gen_ai.usage.output_tokens", self._tokens)
        self._span.end()
