"""The requests: what the options of the command make of prompts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from gristmill.runtime.errors import UsageError
from gristmill.tools.bench_serve.client import Client
from gristmill.tools.bench_serve.prompts import Prompt, Range, file_prompts, random_prompts


def first_model(body: bytes) -> str:
    """The first model in the answer of /models. UsageError: it has none."""
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise UsageError("the server lists no models: name one by --model") from error


def prompts_of(options: dict[str, Any], seed: int) -> Iterator[Prompt]:
    """The endless prompts that the options of the command describe."""
    if options["dataset"] != "random":
        return itertools.cycle(file_prompts(Path(options["dataset"]), options["output_tokens"], seed))
    return random_prompts(
        options["input_tokens"],
        options["output_tokens"] or Range(128, 128),
        options["prefix_tokens"],
        options["prefixes"],
        seed,
        None if options["tokenizer"] is None else _exactly(options["tokenizer"]),
    )


def _exactly(model: str) -> Callable[[str, int], str]:
    """Cuts a text to a number of tokens of a model."""
    from gristmill.runtime.tokenizer import Tokenizer

    tokenizer = Tokenizer(model)

    def cut(text: str, count: int) -> str:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return tokenizer.decode(ids[:count])

    return cut


def requests_of(
    client: Client, api: str, model: str, extra: dict[str, Any], prompts: Iterator[Prompt], ignore_eos: bool
) -> Iterator[bytes]:
    """The requests of prompts, as they are sent. extra: entries that override ours."""
    encode = msgspec.json.Encoder().encode
    route = "/chat/completions" if api == "chat" else "/completions"
    for prompt in prompts:
        body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        if api == "chat":
            body["messages"] = prompt.chat()
        else:
            body["prompt"] = prompt.completion()
        if prompt.max_tokens is not None:
            body["max_tokens"] = prompt.max_tokens
        if ignore_eos:
            body["ignore_eos"] = True
        yield client.request(route, encode(body | extra))
