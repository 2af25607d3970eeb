"""``usage`` of OpenAI's APIs: the tokens that a request took."""

from __future__ import annotations

from typing import Any

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


def end_of_stream(before: bytes, options: StreamOptions | None, *generations: Generation) -> bytes:
    """The end of a stream, with usage if it is asked for. `before`: what stands before the choices of an event."""
    last = b"data: [DONE]\n\n"
    if options is None or not options.include_usage:
        return last
    return before + b'],"usage":' + encode(usage(*generations)) + b"}\n\n" + last
