"""Requests of Dynamo as `gristmill.SamplingParams`, and chunks as Dynamo takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill.runtime.completion import Chunk
from gristmill.runtime.errors import UsageError
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import TokenLogprobs
from gristmill.runtime.structured_output import StructuredOutput

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "n",
    "logit_bias",
)
"""The entries of sampling_options with the same name and meaning."""
STOPPING = ("max_tokens", "min_tokens", "ignore_eos", "stop", "stop_token_ids", "stop_token_ids_hidden")
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (0, 1),
    "include_stop_str_in_output": (False,),
    "max_thinking_tokens": (),
}
"""Options that are not served, with the values that ask for nothing."""
GRAMMARS = {"json": "json_schema", "regex": "regex", "grammar": "grammar", "choice": "choice"}
"""Dynamo's names of guided decoding, and those of `StructuredOutput`."""
FINISH = {"stop": "stop", "length": "length", "abort": "cancelled"}


def sampling_params(request: Mapping[str, Any], room: int) -> SamplingParams:
    """The parameters of a request. Text is Dynamo's: stop strings are matched there, too.

    Args:
        room: tokens that fit after the prompt, for requests that name no limit.

    Raises:
        UsageError: an option that is not served, or an invalid value.
    """
    sampling = _given(request, "sampling_options")
    stopping = _given(request, "stop_conditions")
    output = _given(request, "output_options")
    guided = sampling.pop("guided_decoding", None)
    values: dict[str, Any] = {}
    for options, known in ((sampling, SAMPLING), (stopping, STOPPING)):
        for name, value in options.items():
            if name in known:
                values[name] = value
            elif value not in NEUTRAL.get(name, ()):
                raise UsageError(f"gristmill does not serve {name} = {value!r}")
    hidden = values.pop("stop_token_ids_hidden", ())  # those of the model and its generation_config.json
    values["stop_token_ids"] = [*values.get("stop_token_ids", ()), *hidden]
    if values.get("top_k") == -1:
        values["top_k"] = 0
    for name in ("logprobs", "prompt_logprobs"):
        if output.get(name) not in (None, ""):
            values[name] = int(output[name])
    if guided:
        values["structured_output"] = _structured(guided)
    # Options that the caller left out have the OpenAI protocol's defaults.
    return SamplingParams.of({"temperature": 1.0, "max_tokens": max(1, room), **values})


def _given(request: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in (request.get(name) or {}).items() if value is not None}


def _structured(guided: Mapping[str, Any]) -> StructuredOutput:
    chosen = {name: value for name, value in guided.items() if value is not None}
    unknown = sorted(set(chosen) - set(GRAMMARS))
    if unknown:
        raise UsageError(
            f"gristmill does not serve guided decoding by {', '.join(unknown)}; known: {', '.join(GRAMMARS)}"
        )
    return StructuredOutput(**{GRAMMARS[name]: value for name, value in chosen.items()})


def chunk_of(chunk: Chunk, prompt_tokens: int, tokens: int) -> dict[str, Any]:
    """A chunk for Dynamo. `tokens` counts those of its choice so far, with its own."""
    values: dict[str, Any] = {"token_ids": list(chunk.token_ids), "index": chunk.choice}
    if chunk.logprobs:
        values["log_probs"] = [token.logprob for token in chunk.logprobs]
        values["top_logprobs"] = [
            [
                {"rank": rank, "token_id": token, "token": None, "logprob": logprob}
                for rank, (token, logprob) in enumerate(position.top, 1)
            ]
            for position in chunk.logprobs
        ]
    if chunk.prompt_logprobs is not None:
        values["engine_data"] = {
            "prompt_logprobs": [_position(position) for position in chunk.prompt_logprobs]
        }
    if chunk.finish_reason is not None:
        values["finish_reason"] = FINISH[chunk.finish_reason]
        values["completion_usage"] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": prompt_tokens + tokens,
        }
    return values


def _position(token: TokenLogprobs | None) -> dict[str, dict[str, Any]] | None:
    if token is None:
        return None
    ranked = [
        (other, {"logprob": logprob, "rank": rank}) for rank, (other, logprob) in enumerate(token.top, 1)
    ]
    own = (token.token_id, {"logprob": token.logprob, "rank": token.rank})
    return {str(other): entry for other, entry in (*ranked, own)}
