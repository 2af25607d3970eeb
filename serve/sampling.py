"""Sampling in requests: the fields that OpenAI's API and vLLM's server have, as `SamplingParams`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from gristmill.runtime.errors import UsageError
from gristmill.runtime.sampling_params import SamplingParams, token_biases
from gristmill.runtime.structured_output import StructuredOutput
from gristmill.serve.errors import ApiError
from gristmill.serve.service import Service

MAX_STOPS, MAX_BAD_WORDS, MAX_CHARACTERS = 64, 1024, 1024
MAX_TOKEN_IDS = 1024
"""Entries of logit_bias and stop_token_ids."""
MAX_LOGPROBS = 20
"""Most likely tokens at each position, of the output or the prompt: as OpenAI's and vLLM's servers have it."""
MAX_INTERVAL_MS = 60_000
MAX_SCHEMA_DEPTH = 32


class StreamOptions(msgspec.Struct):
    """``stream_options``."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """The fields that completions and conversations share. Unknown fields are ignored, as clients send new ones every month."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval_ms: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    return_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    functions: Any = None
    function_call: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None


DIRECT = (
    "n",
    "seed",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "bad_words",
    "allowed_token_ids",
    "prompt_logprobs",
)


def sampling_params(
    service: Service, request: SamplingFields, *, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    """The parameters of a request; what it does not say is as the model recommends, then temperature 1 and no filter.

    Args:
        max_tokens: of each completion.
        logprobs: as in `SamplingParams`.

    Raises:
        ApiError: a limit of the server, or an invalid value.
    """
    check_choices(service, request)
    _check_replaced(request)
    for name, most in (
        ("stop_token_ids", MAX_TOKEN_IDS),
        ("allowed_token_ids", service.vocab_size),
        ("logit_bias", MAX_TOKEN_IDS),
    ):
        if len(getattr(request, name) or ()) > most:
            raise _limit(name, f"{len(getattr(request, name))} entries", most)
    check_logprobs("prompt_logprobs", request.prompt_logprobs)
    if not 0 <= (request.stream_interval_ms or 0) <= MAX_INTERVAL_MS:
        raise ApiError(
            400,
            f"stream_interval_ms must be 0 to {MAX_INTERVAL_MS}, got {request.stream_interval_ms}",
            param="stream_interval_ms",
        )
    values: dict[str, Any] = {"temperature": 1.0, **service.defaults}
    for name in DIRECT:
        if (value := getattr(request, name)) is not None:
            values[name] = value
    if values.get("top_k") == -1:  # vLLM's way of saying all
        values["top_k"] = 0
    if values.get("seed") is not None:
        values["seed"] %= 1 << 63  # clients send negative ones
    if request.stop:
        values["stop"] = _texts("stop", request.stop, MAX_STOPS)
    if request.bad_words:
        values["bad_words"] = _texts("bad_words", request.bad_words, MAX_BAD_WORDS)
    if request.logit_bias:
        values["logit_bias"] = _biases(request.logit_bias, service.vocab_size)
    if (structure := structured_output(service, request)) is not None:
        values["structured_output"] = structure
    try:
        return SamplingParams(**values, max_tokens=max_tokens, logprobs=logprobs)
    except UsageError as error:
        name = str(error).partition(" ")[0]
        raise ApiError(400, str(error), param=name if name in values else None) from error


def check_logprobs(name: str, given: int | None) -> None:
    """ApiError: more candidates at each position than the server shows, or fewer than none."""
    if given is not None and not 0 <= given <= MAX_LOGPROBS:
        raise ApiError(400, f"{name} must be 0 to {MAX_LOGPROBS}, got {given}", param=name)


def _check_replaced(request: SamplingFields) -> None:
    """ApiError: a field of earlier APIs of OpenAI and vLLM. Without what it asks for, an answer would be wrong."""
    for name, given, other in (
        ("functions", request.functions, "tools"),
        ("function_call", request.function_call, "tool_choice"),
        ("guided_json", request.guided_json, "structured_outputs"),
        ("guided_regex", request.guided_regex, "structured_outputs"),
        ("guided_choice", request.guided_choice, "structured_outputs"),
        ("guided_grammar", request.guided_grammar, "structured_outputs"),
    ):
        if given is not None:
            raise ApiError(400, f"{name} is not supported: use {other}", param=name)


def check_choices(service: Service, request: SamplingFields, prompts: int = 1) -> None:
    """ApiError: more completions than the server makes for one request with so many prompts."""
    choices = (request.n or 1) * prompts
    if choices > service.config.max_choices:
        raise _limit("n", f"{choices} completions", service.config.max_choices)


def structured_output(service: Service, request: SamplingFields) -> StructuredOutput | None:
    """What the output looks like: from response_format, or vLLM's structured_outputs."""
    found: dict[str, Any] = {}
    if request.response_format is not None:
        found |= _response_format(request.response_format)
    for name, value in (request.structured_outputs or {}).items():
        if name not in _STRUCTURED and name not in _STRUCTURED_OPTIONS:
            raise ApiError(
                400,
                f"structured_outputs takes {', '.join(_STRUCTURED)}, got {name!r}",
                param="structured_outputs",
            )
        if value is not None and name in _STRUCTURED:
            found |= {_STRUCTURED[name]: value} if name != "json_object" else _any_object(value)
    if not found:
        return None
    if len(found) > 1:
        raise ApiError(400, f"one of {', '.join(sorted(found))} can describe the output, not several")
    for name, value in found.items():
        check_schema(service, name, value)
    return StructuredOutput(**found)


_STRUCTURED = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
    "json_object": "json_schema",
}
_STRUCTURED_OPTIONS = (
    "disable_fallback",
    "disable_any_whitespace",
    "disable_additional_properties",
    "whitespace_pattern",
)
"""vLLM's, of how it keeps a structure; they do not say which."""


def _any_object(wanted: Any) -> dict[str, Any]:
    return {"json_schema": {"type": "object"}} if wanted else {}


def _response_format(form: Mapping[str, Any]) -> dict[str, Any]:
    kind = form.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return _any_object(True)
    if kind == "json_schema":
        given = form.get("json_schema")
        schema = given.get("schema") if isinstance(given, Mapping) else None
        # The responses API has the schema itself in the format.
        schema = form.get("schema") if schema is None else schema
        if not isinstance(schema, Mapping):
            raise ApiError(
                400,
                "response_format of type json_schema needs json_schema.schema, an object",
                param="response_format",
            )
        return {"json_schema": schema}
    if kind == "structural_tag":
        return {"structural_tag": {k: v for k, v in form.items() if k in ("type", "structures", "triggers")}}
    if kind == "grammar" and isinstance(form.get("grammar"), str):
        return {"grammar": form["grammar"]}
    raise ApiError(
        400,
        f"response_format.type must be text, json_object, json_schema, structural_tag or grammar, got {kind!r}",
        param="response_format",
    )


def check_schema(service: Service, name: str, value: Any) -> None:
    """ApiError if a schema or grammar is larger or deeper than the server takes."""
    most = service.config.max_schema_bytes
    if not isinstance(value, str):
        depth, entries = _extent(value, most)
        if entries > most:  # each is a byte or more: to know, their text need not be written
            raise _limit(name, f"{entries} entries", most)
        if depth > MAX_SCHEMA_DEPTH:
            raise _limit(name, f"{depth} levels", MAX_SCHEMA_DEPTH)
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) > most:
        raise _limit(name, f"{len(text)} bytes", most)


def _extent(value: Any, most: int) -> tuple[int, int]:
    """(levels of arrays and objects, their entries), as far as it takes to find more than `most` entries."""
    deepest = entries = 0
    level = [value] if isinstance(value, Mapping | list) else []
    while level:
        deepest += 1
        entries += sum(map(len, level))
        if entries > most:
            break
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, Mapping) else outer)
            if isinstance(inner, Mapping | list)
        ]
    return deepest, entries


def _texts(name: str, given: str | list[str], most: int) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if len(texts) > most:
        raise _limit(name, f"{len(texts)} texts", most)
    longest = max((len(one) for one in texts), default=0)
    if longest > MAX_CHARACTERS:
        raise _limit(name, f"a text of {longest} characters", MAX_CHARACTERS)
    return texts


def _biases(given: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    biases = token_biases(given)
    for token in biases:
        if not isinstance(token, int) or token >= vocab_size:
            raise ApiError(
                400,
                f"logit_bias must map token ids below {vocab_size} to numbers, got {token!r}",
                param="logit_bias",
            )
    return biases


def _limit(param: str, got: str, most: int) -> ApiError:
    return ApiError(400, f"{param}: {got} are more than this server takes ({most})", param=param)
