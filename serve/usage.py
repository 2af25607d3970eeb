"""``usage`` of OpenAI's APIs: the tokens that a request took."""

from __future__ import annotations

from typing import Any

from gristmill.serve.generation import Generation


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
