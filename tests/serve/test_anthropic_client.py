"""The `anthropic` package through the messages API, over outputs that are known."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pydantic
import pytest
from anthropic.types import Message as PublishedMessage
from anthropic.types import MessageTokensCount, ModelInfo, RawMessageStreamEvent
from anthropic.types.shared.error_response import ErrorResponse

from gristmill.runtime.chat.conversation import CallDelta, Delta, Message, ToolCall
from gristmill.runtime.completion import Chunk
from gristmill.runtime.errors import ErrorInfo
from gristmill.runtime.scheduler import QueueFull
from gristmill.serve.anthropic_events import MessageEvents, MessageFold
from gristmill.serve.generation import Part
from tests.serve.shapes import events_of, validated
from tests.serve.stage import HTTP, Stage, stage
from tests.serve.test_rules import wait_for

WEATHER = {
    "name": "weather",
    "description": "The weather of a town",
    "input_schema": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
}
ASK = {"model": "scripted", "max_tokens": 100, "messages": [{"role": "user", "content": "Hello"}]}
SCRIPTS = {
    "text": "Grüße, 世界! 👋🏽 done",
    "thoughts": "«The user greets. 思考»Hello",
    "call": '⟦weather|{"town": "Zürich ⟪a⟫", "n": [1, {"b": null}]}⟧',
    "all": '«Two towns»I look.\n⟦weather|{"town": "Bern"}⟧⟦weather|{"town": "Rom"}⟧',
    "call without arguments": "⟦weather|⟧",
    "arguments that are no object": "⟦weather|[1⟧",
    "nothing": "",
    "space": " \n ",
}
MIXED = {
    "text after a call": '⟦weather|{"town": "Bern"}⟧Then I wait.⟦weather|{}⟧',
    "thoughts twice": "«a»b«c»d",
    "space between calls": '«a»I look. ⟦weather|{"town": "Bern"}⟧\n\n⟦weather|{}⟧\n',
}
"""What a model writes in another order. A part of several tokens does not say in which order they came."""


@pytest.fixture(scope="module")
def scripted() -> Iterator[Stage]:
    """A server."""
    with stage() as one:
        yield one


@pytest.fixture(scope="module")
def client(scripted: Stage) -> Iterator[anthropic.Anthropic]:
    """A client."""
    with anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0, timeout=60) as one:
        yield one


def post(scripted: Stage, body: Any, path: str = "/v1/messages", **headers: str) -> httpx.Response:
    """A request without the package."""
    return HTTP.post(scripted.url + path, json=body, headers=headers, timeout=60)


@pytest.mark.parametrize("name", SCRIPTS)
def test_whole_and_streamed_are_the_same_message(
    scripted: Stage, client: anthropic.Anthropic, name: str
) -> None:
    """However the output is cut; every answer and event is valid; the package adds the events up to the whole answer."""
    ask = ASK | {
        "max_tokens": 2000,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [WEATHER],
    }
    scripted.plays(SCRIPTS[name])
    whole = post(scripted, ask).json()
    assert validated(PublishedMessage, whole) == set()
    for seed in range(12):
        scripted.plays(SCRIPTS[name], seed=seed)
        events = events_of(post(scripted, ask | {"stream": True}))
        assert all(event == data["type"] for event, data in events)
        for _, data in events:
            assert validated(RawMessageStreamEvent, data) == set()
        fold = MessageFold()
        fold.add(data for _, data in events)
        assert without_ids(fold.message) == without_ids(whole)
    with client.messages.stream(**{key: value for key, value in ask.items() if key != "stream"}) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    if name != "arguments that are no object":  # which the package reads as far as it goes
        assert without_ids(final.to_dict()) == without_ids(whole)
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """A message as it is whatever the request."""
    blocks = [
        {k: v for k, v in one.items() if k not in ("id", "parsed_output")} for one in message["content"]
    ]
    usage = {k: v for k, v in message["usage"].items() if k != "output_tokens"}
    return {k: v for k, v in message.items() if k != "id"} | {"content": blocks, "usage": usage}


@pytest.mark.parametrize("name", MIXED)
def test_other_orders(scripted: Stage, name: str) -> None:
    """Token by token, blocks are in the model's order; cut otherwise, nothing is lost."""
    ask = ASK | {"thinking": {"type": "adaptive"}, "tools": [WEATHER]}
    expected: list[Any] = {
        "text after a call": [
            ["tool_use", None, {"town": "Bern"}],
            ["text", "Then I wait.", None],
            ["tool_use", None, {}],
        ],
        "thoughts twice": [
            ["thinking", None, None],
            ["text", "b", None],
            ["thinking", None, None],
            ["text", "d", None],
        ],
        "space between calls": [
            ["thinking", None, None],
            ["text", "I look. ", None],
            ["tool_use", None, {"town": "Bern"}],
            ["tool_use", None, {}],
        ],
    }[name]
    for seed in range(12):
        scripted.plays(MIXED[name], seed=seed, **({} if seed else {"sizes": [1]}))
        fold = MessageFold()
        fold.add(data for _, data in events_of(post(scripted, ask | {"stream": True})))
        content = fold.message["content"]
        if not seed:
            assert [[one["type"], one.get("text"), one.get("input")] for one in content] == expected
        for field in ("text", "thinking"):
            written = "".join(one.get(field, "") for one in content).split()
            assert "".join(written) == {
                "text after a call": {"text": "ThenIwait."},
                "thoughts twice": {"text": "bd", "thinking": "ac"},
                "space between calls": {"text": "Ilook.", "thinking": "a"},
            }[name].get(field, "")
        assert [one["input"] for one in content if one["type"] == "tool_use"] == (
            [] if name == "thoughts twice" else [{"town": "Bern"}, {}]
        )


def test_blocks_of_an_answer(scripted: Stage, client: anthropic.Anthropic) -> None:
    """Thinking, text, calls, in this order, with ids and parsed input."""
    scripted.plays(SCRIPTS["all"])
    answer = client.messages.create(**ASK, tools=[WEATHER], thinking={"type": "adaptive"})
    thinking, text, first, second = answer.content
    assert thinking.type == "thinking" and thinking.thinking == "Two towns" and thinking.signature
    assert text.type == "text" and text.text == "I look.\n"
    assert first.type == second.type == "tool_use"
    assert first.id.startswith("toolu_") and second.id.startswith("toolu_") and first.id != second.id
    assert (first.name, first.input, second.input) == ("weather", {"town": "Bern"}, {"town": "Rom"})
    assert answer.stop_reason == "tool_use" and answer.id.startswith("msg_")
    assert answer.usage.output_tokens_details is not None
    assert answer.usage.output_tokens_details.thinking_tokens == len("Two towns")
    assert answer.usage.output_tokens == len(SCRIPTS["all"]) + 1
    assert answer.usage.cache_read_input_tokens == 0 and answer.usage.input_tokens > 0


@pytest.mark.parametrize(
    ("thinking", "shown"),
    [
        (None, []),
        ({"type": "disabled"}, []),
        ({"type": "adaptive"}, ["Hm"]),
        ({"type": "enabled", "budget_tokens": 50}, ["Hm"]),
        ({"type": "adaptive", "display": "omitted"}, [""]),
    ],
)
def test_thoughts_are_shown_to_those_who_asked(
    scripted: Stage, client: anthropic.Anthropic, thinking: Any, shown: list[str]
) -> None:
    """And the model is told whether to think."""
    scripted.plays("«Hm»Hi")
    more = {} if thinking is None else {"thinking": thinking}
    answer = client.messages.create(**ASK, **more)
    assert [block.thinking for block in answer.content if block.type == "thinking"] == shown
    assert [block.text for block in answer.content if block.type == "text"] == ["Hi"]
    _, options, _ = scripted.seen
    kind = "disabled" if thinking is None else thinking["type"]
    assert options.reasoning is {"disabled": False, "adaptive": None, "enabled": True}[kind]


@pytest.mark.parametrize(
    ("finish", "stop", "more", "reason"),
    [
        ("stop", None, {}, "end_turn"),
        ("length", None, {}, "max_tokens"),
        ("length", None, {"max_tokens": 100_000}, "model_context_window_exceeded"),
        ("stop", "###", {"stop_sequences": ["###"]}, "stop_sequence"),
        ("stop", "<|end|>", {"stop_sequences": ["###"]}, "end_turn"),
        ("stop", 17, {}, "end_turn"),
    ],
)
def test_stop_reasons(
    scripted: Stage, client: anthropic.Anthropic, finish: str, stop: Any, more: Any, reason: str
) -> None:
    """Whole and streamed."""
    scripted.plays("Hi", finish, stop_reason=stop)
    answer = client.messages.create(**ASK | more)
    assert answer.stop_reason == reason
    assert answer.stop_sequence == ("###" if reason == "stop_sequence" else None)
    with client.messages.stream(**ASK | more) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == (answer.stop_reason, answer.stop_sequence)


def test_conversation_reaches_the_model(scripted: Stage, client: anthropic.Anthropic) -> None:
    """System, thoughts, calls and their results as messages; neighbours of one role are joined."""
    scripted.plays("Hi")
    client.messages.create(
        **ASK
        | {
            "system": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}],
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "user", "content": [{"type": "text", "text": "b"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": "s"},
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "text", "text": "I look."},
                        {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"town": "Ü"}},
                        {"type": "tool_use", "id": "call_2", "name": "clock", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "toolu_1",
                            "content": [{"type": "text", "text": "sun"}, {"type": "text", "text": "warm"}],
                        },
                        {
                            "type": "tool_result",
                            "tool_use_id": "call_2",
                            "content": "broken",
                            "is_error": True,
                        },
                        {"type": "text", "text": "and?"},
                    ],
                },
                {"role": "assistant", "content": "It"},
                {"role": "assistant", "content": " is"},
            ],
        },
        tools=[WEATHER],
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        stop_sequences=["x"],
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 5},
        metadata={"user_id": "u"},
        output_config={"effort": "max"},
    )
    messages, options, params = scripted.seen
    calls = (ToolCall("1", "weather", '{"town": "Ü"}'), ToolCall("call_2", "clock", "{}"))
    assert messages == [
        Message("system", "Be\n\nbrief"),
        Message("user", "a\nb"),
        Message("assistant", "I look.", "t", calls),
        Message("tool", "sun\nwarm", tool_call_id="1", name="weather"),
        Message("tool", "Error: broken", tool_call_id="call_2", name="clock"),
        Message("user", "and?"),
        Message("assistant", "It is"),
    ]
    assert options.continue_final and not options.parallel_tool_calls
    assert (options.tool_choice, options.tool_name) == ("named", "weather")
    assert options.tools[0].parameters == WEATHER["input_schema"] and options.reasoning_effort == "high"
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (100, 0.5, 0.9, 5)
    assert params.stop == ("x",)


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        (None, "auto"),
    ],
)
def test_tool_choice(scripted: Stage, client: anthropic.Anthropic, given: Any, choice: str) -> None:
    """As the options of the conversation have it."""
    scripted.plays("Hi")
    client.messages.create(**ASK, tools=[WEATHER], **({"tool_choice": given} if given else {}))
    assert scripted.seen[1].tool_choice == choice


class Town(pydantic.BaseModel):
    """What an answer is parsed as."""

    name: str
    people: int


def test_structured_output(scripted: Stage, client: anthropic.Anthropic) -> None:
    """By parse, whose schema reaches the engine, and by the field's two places."""
    scripted.plays('{"name": "Bern", "people": 134506}')
    answer = client.messages.parse(**ASK, output_format=Town)
    assert answer.parsed_output == Town(name="Bern", people=134506)
    structure = scripted.seen[2].structured_output
    assert structure is not None and isinstance(structure.json_schema, dict)
    assert set(structure.json_schema["properties"]) == {"name", "people"}
    with client.messages.stream(**ASK, output_format=Town) as stream:
        assert stream.get_final_message().parsed_output == Town(name="Bern", people=134506)
    form = {"type": "json_schema", "schema": {"type": "object"}}
    for more in ({"output_format": form}, {"output_config": {"format": form}}):
        assert post(scripted, ASK | more).status_code == 200
        structure = scripted.seen[2].structured_output
        assert structure is not None and structure.json_schema == {"type": "object"}


def test_count_tokens(scripted: Stage, client: anthropic.Anthropic) -> None:
    """It counts what messages computes."""
    scripted.plays("Hi")
    messages: Any = [{"role": "user", "content": "How many tokens are these? 世界"}]
    count = client.messages.count_tokens(model="scripted", messages=messages, system="Be brief")
    answer = client.messages.create(model="scripted", messages=messages, system="Be brief", max_tokens=1)
    assert count.input_tokens == answer.usage.input_tokens > 8
    body = {"model": "scripted", "messages": messages}
    assert validated(MessageTokensCount, post(scripted, body, "/v1/messages/count_tokens").json()) == set()


def test_the_log_says_why_it_ended(tmp_path: Path) -> None:
    """The same for whole and streamed answers of both APIs, without their text."""
    log = tmp_path / "log"
    with stage(log_file=str(log)) as scripted:
        scripted.plays("«secret»Hello", "length")
        for stream in (False, True):
            post(scripted, ASK | {"stream": stream})
            post(scripted, {"input": "Hello", "stream": stream}, "/v1/responses")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    found = [one for one in lines if one["event"] == "request"]
    assert [(one["finish"], one["status"], one["output_tokens"]) for one in found] == [
        (["length"], 200, 14)
    ] * 4
    assert "secret" not in log.read_text() and "Hello" not in log.read_text()


def test_tokens_are_counted_without_weights() -> None:
    """As the rest of what needs a tokenizer alone."""
    with stage(render_only=True) as scripted:
        body = {"messages": ASK["messages"]}
        assert post(scripted, body, "/v1/messages/count_tokens").json()["input_tokens"] > 1
        answer = post(scripted, ASK)
        assert answer.status_code == 501 and validated(ErrorResponse, answer.json()) == set()


def test_models(scripted: Stage, client: anthropic.Anthropic) -> None:
    """The list, and one; what this API has and the server has not is an error in its shape."""
    assert [one.id for one in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").max_input_tokens == 512
    entry = HTTP.get(f"{scripted.url}/v1/models/scripted").json()
    assert validated(ModelInfo, entry) == {"object", "created", "owned_by", "root", "parent", "max_model_len"}
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.batches.retrieve("msgbatch_1")
    assert caught.value.type == "not_found_error" and caught.value.request_id


def test_beta_client(scripted: Stage, client: anthropic.Anthropic) -> None:
    """client.beta, which adds ?beta=true."""
    scripted.plays(SCRIPTS["all"])
    whole = client.beta.messages.create(**ASK, tools=[WEATHER], betas=["some-2030-01-01"])
    assert [block.type for block in whole.content] == ["text", "tool_use", "tool_use"]
    with client.beta.messages.stream(**ASK, tools=[WEATHER]) as stream:
        assert len(stream.get_final_message().content) == 3
    scripted.plays('{"name": "Bern", "people": 1}')
    assert client.beta.messages.parse(**ASK, output_format=Town).parsed_output == Town(name="Bern", people=1)


def test_async_client_streams_and_leaves(scripted: Stage) -> None:
    """Eight streams at once; text_stream has the text; who leaves a stream that never ends ends its request."""
    scripted.plays("Hello there")

    async def main() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=scripted.url, api_key="none", max_retries=0) as client:

            async def one() -> str:
                async with client.messages.stream(**ASK) as stream:
                    return "".join([text async for text in stream.text_stream])

            texts = await asyncio.gather(*(one() for _ in range(8)))
            scripted.plays("Hello", "hang")
            left = scripted.engine.left
            async with client.messages.stream(**ASK) as stream:
                async for _ in stream.text_stream:
                    break
            asked = len(scripted.engine.seen)
            waiting = asyncio.ensure_future(client.messages.create(**ASK))
            await asyncio.to_thread(wait_for, lambda: len(scripted.engine.seen) > asked)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await asyncio.to_thread(wait_for, lambda: scripted.engine.left == left + 2)
            return texts

    assert asyncio.run(main()) == ["Hello there"] * 8


def test_long_inputs_take_time_in_proportion(scripted: Stage) -> None:
    """Not as the square of their length: no request blocks the server, which is a thread of this process."""
    content = [{"type": "text", "text": "a" * 20}] * 40_000
    begin = time.process_time()
    answer = post(scripted, ASK | {"messages": [{"role": "user", "content": content}]})
    assert answer.status_code == 400 and "tokens" in answer.json()["error"]["message"]
    assert time.process_time() - begin < 2


@pytest.mark.parametrize("raw", [{"authorization": "Bearer one"}, {"x-api-key": "one"}])
def test_keys(tmp_path: Any, raw: dict[str, str]) -> None:
    """Both headers; without a key the error has this API's shape."""
    keys = tmp_path / "keys"
    keys.write_text("one\n")
    with stage(api_key_file=str(keys)) as scripted:
        scripted.plays("Hi")
        assert post(scripted, ASK, **raw).status_code == 200
        answer = post(scripted, ASK, **{name: value + "x" for name, value in raw.items()})
        assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"


def nested(levels: int) -> Any:
    """A schema of so many levels."""
    return {"properties": {"a": nested(levels - 1)}} if levels else {}


USER = {"role": "user", "content": "a"}
BAD: dict[str, dict[str, Any]] = {
    "no max_tokens": {"max_tokens": None},
    "max_tokens of 0": {"max_tokens": 0},
    "max_tokens as text": {"max_tokens": "many"},
    "no messages": {"messages": []},
    "messages as text": {"messages": "Hello"},
    "unknown role": {"messages": [{"role": "critic", "content": "a"}]},
    "no content": {"messages": [{"role": "user"}]},
    "empty content": {"messages": [{"role": "user", "content": []}]},
    "image": {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    "document": {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
    "text without text": {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    "text as number": {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
    "result without id": {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
    "image in a result": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}],
            }
        ]
    },
    "tool_use without name": {
        "messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "input": {}}]}]
    },
    "tool_use with a list": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "a", "name": "b", "input": []}],
            },
        ]
    },
    "continued tool_use": {
        "messages": [
            USER,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]},
        ]
    },
    "continued nothing": {"messages": [USER, {"role": "assistant", "content": ""}]},
    "thinking without thinking": {
        "messages": [USER, {"role": "assistant", "content": [{"type": "thinking"}]}]
    },
    "server's block": {
        "messages": [USER, {"role": "assistant", "content": [{"type": "server_tool_use", "id": "a"}]}]
    },
    "system as number": {"system": 1},
    "system with an image": {"system": [{"type": "image"}]},
    "server's tool": {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    "server of tools": {"mcp_servers": [{"type": "url", "url": "http://a", "name": "a"}]},
    "tool without schema": {"tools": [{"name": "a"}]},
    "tool without name": {"tools": [{"input_schema": {}}]},
    "two tools of one name": {"tools": [WEATHER, WEATHER]},
    "deep schema": {"tools": [{"name": "a", "input_schema": nested(40)}]},
    "too many tools": {"tools": [{"name": str(number), "input_schema": {}} for number in range(300)]},
    "unknown choice": {"tools": [WEATHER], "tool_choice": {"type": "some"}},
    "choice of an unknown tool": {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "b"}},
    "choice without tools": {"tool_choice": {"type": "any"}},
    "choice as text": {"tools": [WEATHER], "tool_choice": "auto"},
    "stop as text": {"stop_sequences": "a"},
    "empty stop": {"stop_sequences": [""]},
    "long stop": {"stop_sequences": ["a" * 5000]},
    "negative temperature": {"temperature": -1},
    "temperature as text": {"temperature": "hot"},
    "top_p of 2": {"top_p": 2},
    "top_k of -7": {"top_k": -7},
    "thinking of another kind": {"thinking": {"type": "deep"}},
    "thinking without budget": {"thinking": {"type": "enabled"}},
    "thinking of 0": {"thinking": {"type": "enabled", "budget_tokens": 0}},
    "thinking of all": {"thinking": {"type": "enabled", "budget_tokens": 100}},
    "unknown effort": {"output_config": {"effort": "none"}},
    "unknown format": {"output_config": {"format": {"type": "xml", "schema": {}}}},
    "format without schema": {"output_format": {"type": "json_schema"}},
    "schema as text": {"output_format": {"type": "json_schema", "schema": "{}"}},
    "stream as text": {"stream": "yes"},
    "long prompt": {"messages": [{"role": "user", "content": "word " * 2000}]},
}


@pytest.mark.parametrize("name", BAD)
def test_malformed_requests(scripted: Stage, name: str) -> None:
    """400, in the shape of the API, before anything reaches the engine."""
    requests = len(scripted.engine.seen)
    for stream in (False, True):
        answer = post(scripted, {"stream": stream} | ASK | BAD[name])
        assert answer.status_code == 400, answer.text
        body = answer.json()
        assert validated(ErrorResponse, body) == set()
        assert body["error"]["type"] == "invalid_request_error"
        assert answer.headers["request-id"] == body["request_id"]
    assert len(scripted.engine.seen) == requests


def test_refusals_name_what_they_refuse(scripted: Stage) -> None:
    """The kind of a block, the type of a tool."""
    for name, word in (("image", "'image'"), ("document", "'document'"), ("server's tool", "web_search")):
        assert word in post(scripted, ASK | BAD[name]).json()["error"]["message"]
    assert "messages[0].content[0]" in post(scripted, ASK | BAD["image"]).json()["error"]["message"]


def test_other_errors(scripted: Stage, client: anthropic.Anthropic) -> None:
    """Each status is the package's exception, with the id of the request."""
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**ASK | {"model": "claude"})
    assert missing.value.type == "not_found_error" and missing.value.request_id
    scripted.plays("", error=QueueFull("too many requests wait"))
    with pytest.raises(anthropic.RateLimitError) as full:
        client.messages.create(**ASK, stream=True)
    assert full.value.type == "rate_limit_error" and full.value.response.headers["retry-after"]
    scripted.plays("Hi", "error", info=ErrorInfo("nan", "logits were not finite"))
    with pytest.raises(anthropic.InternalServerError) as failed:
        client.messages.create(**ASK)
    assert failed.value.type == "api_error"
    scripted.plays("Hi", "abort")
    with pytest.raises(anthropic.APIStatusError) as ended:
        client.messages.create(**ASK)
    assert ended.value.type == "overloaded_error"
    large = HTTP.post(f"{scripted.url}/v1/messages", content=b" " * (17 << 20), timeout=60)
    assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
    wrong = HTTP.get(f"{scripted.url}/v1/messages")
    assert wrong.status_code == 405 and validated(ErrorResponse, wrong.json()) == set()
    broken = HTTP.post(f"{scripted.url}/v1/messages", content=b'{"model": ')
    assert broken.status_code == 400 and validated(ErrorResponse, broken.json()) == set()


def test_error_within_a_stream(scripted: Stage, client: anthropic.Anthropic) -> None:
    """An event, which the package raises."""
    scripted.plays("Hello there", error=RuntimeError("secret"))
    events = events_of(post(scripted, ASK | {"stream": True}))
    name, data = events[-1]
    assert name == "error" and validated(ErrorResponse, data) == set() and "secret" not in str(data)
    with pytest.raises(anthropic.APIStatusError) as caught, client.messages.stream(**ASK) as stream:
        stream.until_done()
    assert caught.value.type == "api_error"


def test_pings_while_it_waits(
    scripted: Stage, client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first part, too: proxies see a response."""
    monkeypatch.setattr("gristmill.serve.app.HEARTBEAT_SECONDS", 0.0)
    scripted.plays("", "hang")
    with HTTP.stream(
        "POST", f"{scripted.url}/v1/messages", json=ASK | {"stream": True}, timeout=60
    ) as answer:
        lines = answer.iter_lines()
        assert [next(lines), json.loads(next(lines)[6:])] == ["event: ping", {"type": "ping"}]
        scripted.plays("Hi")  # the request goes on waiting, another is answered
        assert client.messages.create(**ASK).stop_reason == "end_turn"


def test_with_an_engine(url: str) -> None:
    """A stop sequence ends the text before it, a schema binds it, a prefill is continued, and both ways are the same."""
    ask: Any = {"model": "docs-llama", "max_tokens": 24, "extra_body": {"temperature": 0}}
    ask["messages"] = [{"role": "user", "content": "The function returns"}]
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        answer = client.messages.create(**ask)
        [block] = answer.content
        assert block.type == "text" and len(block.text) > 20 and answer.stop_reason == "max_tokens"
        assert answer.usage.output_tokens == 24
        stop = block.text[9:13]
        with client.messages.stream(**ask, stop_sequences=["never", stop]) as stream:
            cut = stream.get_final_message()
        assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
        assert stream.get_final_text() == block.text[: block.text.index(stop)]
        begun = ask | {"messages": [*ask["messages"], {"role": "assistant", "content": block.text[:9]}]}
        assert client.messages.count_tokens(model="docs-llama", messages=begun["messages"]).input_tokens > 5
        [rest] = client.messages.create(**begun).content
        assert rest.type == "text" and not rest.text.startswith(block.text[:9])
        word = {"type": "object", "properties": {"word": {"enum": ["yes", "no"]}}, "required": ["word"]}
        word["additionalProperties"] = False
        form: Any = {"format": {"type": "json_schema", "schema": word}}
        bound = client.messages.create(**ask | {"max_tokens": 100}, output_config=form)
        assert bound.content[0].type == "text" and bound.stop_reason == "end_turn"
        assert json.loads(bound.content[0].text)["word"] in ("yes", "no")


def events(*deltas: Delta) -> list[dict[str, Any]]:
    """The events of these parts, and the end."""
    made = MessageEvents({}, thoughts="shown", stops=(), full="max_tokens", usage=dict)
    found = made.start()
    for delta in deltas:
        found += made.of(Part(0, delta, None, Chunk(0, (), "")))
    return found + made.of(Part(0, Delta(), "stop", Chunk(0, (), "", "stop")))


def test_several_kinds_in_one_part() -> None:
    """The rest of a call comes before the text and the call after it; arguments after the end of their call are a defect of the parser."""
    first = Delta(calls=[CallDelta(0, '{"a"', "call_a", "f")])
    second = Delta("Text", calls=[CallDelta(0, ": 1}"), CallDelta(1, "{}", "call_b", "g")])
    fold = MessageFold()
    fold.add(events(first, second))
    kinds = [(block["type"], block.get("input")) for block in fold.message["content"]]
    assert kinds == [("tool_use", {"a": 1}), ("text", None), ("tool_use", {})]
    with pytest.raises(RuntimeError, match="call 0"):
        events(first, Delta("Text"), Delta(calls=[CallDelta(0, "}")]))


@pytest.mark.parametrize(
    ("declared", "fault"),
    [
        (PublishedMessage, {"stop_reason": "eos"}),
        (PublishedMessage, {"usage": {"input_tokens": 1}}),
        (PublishedMessage, {"content": [{"type": "text"}]}),
        (PublishedMessage, {"role": "user"}),
        (PublishedMessage, {"id": 1}),
    ],
)
def test_the_shapes_show_a_wrong_answer(scripted: Stage, declared: Any, fault: dict[str, Any]) -> None:
    """Each fault that the package itself accepts."""
    scripted.plays("Hi")
    good = post(scripted, ASK).json()
    assert validated(declared, good | {"new": 1}) == {"new"}
    declared.construct(**good | fault)
    with pytest.raises(pydantic.ValidationError):
        validated(declared, good | fault)
