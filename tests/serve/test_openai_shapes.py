"""Every answer and event of the completions and chat APIs against the published types, and the package's helpers, over outputs that are known."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion_choice import CompletionChoice
from openai.types.completion_choice import Logprobs as CompletionLogprobs

from gristmill.runtime.tokenizer import Tokenizer
from tests.serve.server import MODEL
from tests.serve.shapes import events_of, validated
from tests.serve.stage import HTTP, Stage, stage

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string"}},
            "required": ["town"],
            "additionalProperties": False,
        },
    },
}
CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "Hello"}]}
SCRIPTS = {
    "text": "Grüße, 世界! 👋🏽 done",
    "thoughts": "«The user greets. 思考»Hello",
    "call": '⟦look|{"town": "Zürich ⟪a⟫"}⟧',
    "all": '«Two towns»I look.\n⟦look|{"town": "Bern"}⟧⟦look|{"town": "Rom"}⟧',
    "nothing": "",
}
EXTRA = {
    "choices.message.reasoning",
    "choices.message.reasoning_content",
    "choices.delta.reasoning",
    "choices.delta.reasoning_content",
    "choices.stop_reason",
    "choices.token_ids",
    "choices.prompt_token_ids",
    "choices.prompt_logprobs",
    "prompt_token_ids",
    "prompt_logprobs",
}
"""What vLLM's server has beside the published fields."""


class Logprobs(CompletionLogprobs):
    """Of an echoed prompt: nothing predicts its first token. The published type has no word for it; OpenAI's own server says null."""

    token_logprobs: list[float | None] | None = None  # type: ignore[assignment]
    top_logprobs: list[dict[str, float] | None] | None = None  # type: ignore[assignment]


class Choice(CompletionChoice):
    """A choice with such ones."""

    logprobs: Logprobs | None = None


class Echo(Completion):
    """An answer with such choices."""

    choices: list[Choice]  # type: ignore[assignment]


class StreamedChoice(Choice):
    """Of a stream that goes on: as of conversations, finish_reason is null. The published type knows only whole answers."""

    finish_reason: Literal["stop", "length", "content_filter"] | None  # type: ignore[assignment]


class Streamed(Completion):
    """A part of a stream."""

    choices: list[StreamedChoice]  # type: ignore[assignment]


@pytest.fixture(scope="module")
def scripted() -> Iterator[Stage]:
    """A server."""
    with stage() as one:
        yield one


@pytest.fixture(scope="module")
def client(scripted: Stage) -> Iterator[openai.OpenAI]:
    """A client."""
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0, timeout=60) as one:
        yield one


def answered(url: str, path: str, body: dict[str, Any], whole: Any, part: Any) -> tuple[Any, list[Any]]:
    """(answer, parts of the streamed one), each valid."""
    answer = HTTP.post(f"{url}/v1/{path}", json=body, timeout=60).json()
    assert validated(whole, answer) <= EXTRA
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    events = events_of(HTTP.post(f"{url}/v1/{path}", json=body | streamed, timeout=60))
    assert events.pop() == (None, "[DONE]")
    for name, data in events:
        assert name is None and validated(part, data) <= EXTRA
    parts = [data for _, data in events]
    usages = [one["usage"] | {"prompt_tokens_details": None} for one in (parts[-1], answer)]
    assert parts[-1]["choices"] == [] and usages[0] == usages[1]  # but for what the cache had
    assert all(one.get("usage") is None for one in parts[:-1])
    return answer, parts[:-1]


def message_of(parts: list[Any], index: int = 0) -> dict[str, Any]:
    """The message that the parts of a choice add up to, with its finish_reason."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    deltas = [choice for part in parts for choice in part["choices"] if choice["index"] == index]
    assert deltas[0]["delta"]["role"] == "assistant"
    for number, choice in enumerate(deltas):
        assert (choice["finish_reason"] is not None) == (number == len(deltas) - 1)
        for field in ("content", "reasoning_content"):
            message[field] += choice["delta"].get(field) or ""
        for call in choice["delta"].get("tool_calls", ()):
            if call["index"] == len(message["calls"]):
                message["calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
            message["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return message | {"finish_reason": deltas[-1]["finish_reason"]}


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_chat(scripted: Stage, name: str, finish: str) -> None:
    """Whole and streamed are the same, however the output is cut."""
    for seed in range(6):
        scripted.plays(SCRIPTS[name], finish, seed=seed)
        body = CHAT | {"tools": [LOOK], "logprobs": seed % 2 == 1, "top_logprobs": 2 * (seed % 2)}
        answer, parts = answered(scripted.url, "chat/completions", body, ChatCompletion, ChatCompletionChunk)
        choice, added = answer["choices"][0], message_of(parts)
        message = choice["message"]
        assert (message["content"] or "") == added["content"]
        assert message.get("reasoning_content", "") == added["reasoning_content"]
        calls = [{"id": one["id"]} | one["function"] for one in message.get("tool_calls", ())]
        assert calls == added["calls"]
        assert choice["finish_reason"] == added["finish_reason"]
        assert added["finish_reason"] == ("tool_calls" if calls and finish == "stop" else finish)


def allowed(name: str, mode: str) -> dict[str, Any]:
    """A ``tool_choice`` that allows one tool."""
    tools = [{"type": "function", "function": {"name": name}}]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_allowed_tools(scripted: Stage) -> None:
    """The conversation has no others; an unknown tool or mode is refused by name."""
    scripted.plays("Hi")
    body = CHAT | {"tools": [LOOK, {"type": "function", "function": {"name": "clock"}}]}
    url = f"{scripted.url}/v1/chat/completions"
    for mode in ("auto", "required"):
        assert HTTP.post(url, json=body | {"tool_choice": allowed("clock", mode)}).status_code == 200
        options = scripted.seen[1]
        assert ([tool.name for tool in options.tools], options.tool_choice) == (["clock"], mode)
    for wrong, named in (
        (allowed("b", "auto"), "allows b"),
        (allowed("clock", "some"), "allowed_tools: "),
        ({"type": "allowed_tools"}, "allowed_tools: "),
    ):
        answer = HTTP.post(url, json=body | {"tool_choice": wrong})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "tool_choice") and named in error["message"]


def test_candidates_that_are_parts_of_characters(url: str) -> None:
    """Each has its own entry: under one name, the sampled token would hide a more likely one."""
    ask = {"prompt": "🙂 🙃 🙂 🙃", "echo": True, "max_tokens": 1, "logprobs": 20}
    answer = HTTP.post(f"{url}/v1/completions", json=ask).json()
    logprobs = answer["choices"][0]["logprobs"]
    rows = [*zip(*(logprobs[key] for key in ("tokens", "token_logprobs", "top_logprobs")), strict=True)][1:]
    assert any(sum(name.startswith("bytes:\\x") for name in top) > 2 for _, _, top in rows)
    for name, logprob, top in rows:
        assert top[name] == logprob and len(top) in (20, 21)


def test_chat_of_an_engine(url: str) -> None:
    """Several choices, log-probabilities, everything that can be asked for."""
    body = CHAT | {
        "model": "docs-llama",
        "n": 2,
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
        "return_token_ids": True,
    }
    answer, parts = answered(url, "chat/completions", body, ChatCompletion, ChatCompletionChunk)
    for choice in answer["choices"]:
        added = message_of(parts, choice["index"])
        assert choice["message"]["content"] == added["content"]
        assert choice["finish_reason"] == added["finish_reason"]


@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"echo": True}, {"echo": True, "logprobs": 2}])
def test_completions_of_an_engine(url: str, more: dict[str, Any]) -> None:
    """Two prompts, two choices each."""
    body = {"model": "docs-llama", "prompt": ["The function", "A"], "n": 2, "max_tokens": 6, "temperature": 0}
    whole = Echo if more.get("echo") else Completion
    answer, parts = answered(url, "completions", body | more, whole, Streamed)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for choice in answer["choices"]:
        mine = [one for part in parts for one in part["choices"] if one["index"] == choice["index"]]
        assert "".join(one["text"] for one in mine) == choice["text"]
        assert [one["finish_reason"] for one in mine][-1] == choice["finish_reason"]
        if "logprobs" in more:
            tokens = [token for one in mine if one["logprobs"] for token in one["logprobs"]["tokens"]]
            assert tokens == choice["logprobs"]["tokens"]
            absent = [one is None for one in choice["logprobs"]["token_logprobs"]]
            assert absent == [number == 0 and "echo" in more for number in range(len(absent))]


@pytest.mark.parametrize(
    "more",
    [{}, {"echo": True}, {"prompt": ["Naïve 🙂 x", "A"], "echo": True, "n": 2}, {"stop": ["e", " thex"]}],
)
def test_offsets_of_tokens(url: str, more: dict[str, Any]) -> None:
    """Where a token begins in the text, whole and streamed, also after characters of several tokens."""
    bias = dict.fromkeys(Tokenizer(MODEL).encode("🙂", False), 5.0)
    ask = {
        "prompt": "The naïve 🙂 <|endoftext|> x",
        "max_tokens": 40,
        "logprobs": 0,
        "seed": 3,
        "logit_bias": bias,
    }
    answer, parts = answered(url, "completions", ask | more, Echo, Streamed)
    halves = 0
    for choice in answer["choices"]:
        text, tokens, offsets = (
            choice["text"],
            choice["logprobs"]["tokens"],
            choice["logprobs"]["text_offset"],
        )
        found = [
            (token, place)
            for token, place in zip(tokens, offsets, strict=True)
            if not token.startswith("bytes:\\x")
        ]
        shown = [(token, place) for token, place in found if token not in ("<|endoftext|>", "</s>")]
        assert shown
        halves += len(tokens) - len(found)
        for token, place in shown:
            assert text[place:].startswith(token) or token.startswith(
                text[place:]
            )  # a stop string cuts the last
        mine = [
            one["logprobs"] for part in parts for one in part["choices"] if one["index"] == choice["index"]
        ]
        assert [place for one in mine if one for place in one["text_offset"]] == offsets
    assert halves or "stop" in more


def test_a_prompt_alone_has_no_output(url: str) -> None:
    """echo with max_tokens 0: no token is generated for it, and none is counted."""
    ask = {"prompt": ["The index", "A"], "max_tokens": 0, "echo": True, "logprobs": 1}
    answer, _ = answered(url, "completions", ask, Echo, Streamed)
    assert [one["text"] for one in answer["choices"]] == ["The index", "A"]
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] > 0


def test_completions(scripted: Stage) -> None:
    """Whole and streamed are the same, however the output is cut."""
    for seed in range(6):
        scripted.plays(SCRIPTS["text"], seed=seed)
        body = {"model": "scripted", "prompt": "Hello", "max_tokens": 50}
        answer, parts = answered(scripted.url, "completions", body, Completion, Streamed)
        assert "".join(one["choices"][0]["text"] for one in parts) == SCRIPTS["text"]
        assert answer["choices"][0]["text"] == SCRIPTS["text"]
        assert answer["choices"][0]["finish_reason"] == parts[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_usage_says_what_was_cached(url: str, stream: bool) -> None:
    """In every API, of a prompt that came before; not what the second choice finds of the first."""
    words = " ".join(f"{stream} number {number}" for number in range(40))
    hello = [{"role": "user", "content": words}]
    found = []
    for path, body in (
        ("chat/completions", {"messages": hello, "n": 2, "stream_options": {"include_usage": True}}),
        ("chat/completions", {"messages": hello, "stream_options": {"include_usage": True}}),
        ("messages", {"messages": hello}),
        ("responses", {"input": hello}),
    ):
        limit = {"max_output_tokens" if path == "responses" else "max_tokens": 2, "stream": stream}
        if not stream:
            limit.pop("stream")
            body.pop("stream_options", None)
        answer = HTTP.post(f"{url}/v1/{path}", json=body | limit, timeout=60)
        assert answer.status_code == 200, answer.text
        data = [one for _, one in events_of(answer) if one != "[DONE]"] if stream else [answer.json()]
        usages = [one.get("usage") or one.get("response", {}).get("usage") for one in data]
        found.append([usage for usage in usages if usage][-1])
    whole = found[0]["prompt_tokens"]
    cached = [one["prompt_tokens_details"]["cached_tokens"] for one in found[:2]]
    assert cached[0] == 0 and whole - 17 <= cached[1] < whole
    assert found[2]["cache_read_input_tokens"] == cached[1]
    assert found[2]["input_tokens"] == whole - cached[1]
    assert (
        found[3]["input_tokens_details"]["cached_tokens"] == cached[1] and found[3]["input_tokens"] == whole
    )


def test_a_prompt_without_the_beginning_of_an_answer(url: str) -> None:
    """As vLLM's server: what tokenize counts is what is completed."""
    talk = CHAT["messages"]
    for more in ({}, {"add_generation_prompt": False}):
        body = {"messages": talk} | more
        counted = HTTP.post(f"{url}/tokenize", json=body).json()["tokens"]
        shown = HTTP.post(f"{url}/v1/chat/completions/render", json=body).json()
        assert shown["prompt_token_ids"] == counted
        assert shown["prompt"].endswith("assistant\n") == (not more)
        answer = HTTP.post(f"{url}/v1/chat/completions", json=body | {"max_tokens": 1}, timeout=60).json()
        assert answer["usage"]["prompt_tokens"] == len(counted)


def test_requests_may_share_an_id(url: str) -> None:
    """The client's X-Request-Id comes back, and is no name that only one request can have."""

    async def main() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=60) as client:
            body = {"prompt": ["The", "A"], "max_tokens": 20, "n": 2}
            headers = {"x-request-id": "task-1"}
            asked = [client.post(f"{url}/v1/completions", json=body, headers=headers) for _ in range(6)]
            return await asyncio.gather(*asked)

    for answer in asyncio.run(main()):
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-request-id"] == "task-1"


def test_models(scripted: Stage, client: openai.OpenAI) -> None:
    """The list, and one."""
    names = [one.id for one in client.models.list()]
    assert names == ["scripted"]
    vllms = {"root", "parent", "max_model_len"}
    anthropics = {"type", "display_name", "created_at", "lifecycle", "max_input_tokens", "max_tokens"}
    entry = HTTP.get(f"{scripted.url}/v1/models/scripted").json()
    assert validated(Model, entry) == vllms | anthropics


class Town(pydantic.BaseModel):
    """What an answer, or the arguments of a call, are parsed as."""

    town: str


def test_helpers(scripted: Stage, client: openai.OpenAI) -> None:
    """parse and stream, with a format and with tools."""
    ask: Any = CHAT
    scripted.plays('{"town": "Bern"}')
    answer = client.chat.completions.parse(**ask, response_format=Town)
    assert answer.choices[0].message.parsed == Town(town="Bern")
    with client.chat.completions.stream(**ask, response_format=Town) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.parsed == Town(town="Bern")
    assert {"chunk", "content.delta", "content.done"} <= kinds
    scripted.plays(SCRIPTS["all"])
    tool = openai.pydantic_function_tool(Town, name="look")
    parsed = client.chat.completions.parse(**ask, tools=[tool])
    assert parsed.choices[0].message.tool_calls is not None
    found = [call.function.parsed_arguments for call in parsed.choices[0].message.tool_calls]
    assert found == [Town(town="Bern"), Town(town="Rom")]
    with client.chat.completions.stream(**ask, tools=[tool]) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert [event.parsed_arguments for event in done] == found
    scripted.plays("Half", "length")
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**ask, response_format=Town)


def test_error_within_a_stream(scripted: Stage, client: openai.OpenAI) -> None:
    """The package raises it."""
    scripted.plays("Hello", error=RuntimeError("secret"))
    ask: Any = CHAT
    with pytest.raises(openai.APIError, match="RuntimeError in the server"):
        list(client.chat.completions.create(**ask, stream=True))


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_what_the_server_ends_is_no_answer(scripted: Stage, path: str) -> None:
    """503, or in a stream what there was and then the error: no published finish_reason means it."""
    scripted.plays("Hello", "abort")
    body = CHAT | {"prompt": "Hello"}
    answer = HTTP.post(f"{scripted.url}/v1/{path}", json=body)
    assert answer.status_code == 503 and answer.headers["retry-after"]
    events = events_of(HTTP.post(f"{scripted.url}/v1/{path}", json=body | {"stream": True}))
    assert "error" in events[-1][1] and events[-1][1]["error"]["code"] == "aborted"
    choices = [data["choices"][0] for _, data in events[:-1]]
    assert (
        "".join(one["text"] if "text" in one else one["delta"].get("content", "") for one in choices)
        == "Hello"
    )
    assert all(one["finish_reason"] is None for one in choices)


@pytest.mark.parametrize(
    "fault",
    [
        {"object": "chat"},
        {"created": "now"},
        {"choices": [{"index": 0, "message": {"role": "assistant"}, "finish_reason": "abort"}]},
        {"choices": [{"message": {"role": "assistant"}, "finish_reason": "stop"}]},
        {"usage": {"prompt_tokens": 1}},
    ],
)
def test_the_shapes_show_a_wrong_answer(scripted: Stage, fault: dict[str, Any]) -> None:
    """Each fault that the package itself accepts."""
    scripted.plays("Hi")
    good = HTTP.post(f"{scripted.url}/v1/chat/completions", json=CHAT).json()
    assert validated(ChatCompletion, good) <= EXTRA
    ChatCompletion.construct(**good | fault)
    with pytest.raises(pydantic.ValidationError):
        validated(ChatCompletion, good | fault)
