"""``usage`` of OpenAI's APIs: the tokens that a request took."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from gristmill.serve.encoding import encode
from gristmill.serve.generation import Generation
from gristmill.serve.sampling import StreamOptions


def usage(*generations: Generation) -> dict[str, Any]:
    """The tokens of one or several prompts and their completions."""
    prompt = sum(one.prompt_tokens for one in generations)
    output = sum(one.output_tokens for one in generations)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in generations)},
        "completion_tokens_details": {"reasoning_tokens": sum(one.reasoning_tokens for one in generations)},
    }


class Pooled(Protocol):
    """A result of a model for embeddings or scores."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its texts."""
        ...


def pooling_usage(results: Iterable[Pooled]) -> dict[str, int]:
    """The tokens of texts that nothing was generated for."""
    tokens = sum(one.prompt_tokens for one in results)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def end_of_stream(before: bytes, options: StreamOptions | None, *generations: Generation) -> bytes:
    """The end of a stream, with usage if it is asked for. `before`: what stands before the choices of an event."""
    last = b"data: [DONE]\n\n"
    if options is None or not options.include_usage:
        return last
    return before + b'],"usage":' + encode(usage(*generations)) + b"}\n\n" + last
