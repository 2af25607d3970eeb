"""The `openai` package through the responses API, over outputs that are known."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_item_list import ResponseItemList

from gristmill.runtime.chat.conversation import Message, ToolCall
from gristmill.runtime.errors import ErrorInfo
from gristmill.runtime.scheduler import QueueFull
from gristmill.serve.responses.items import Item
from gristmill.serve.responses.store import ResponseStore, Stored
from tests.serve.shapes import events_of, validated
from tests.serve.stage import HTTP, Stage, stage
from tests.serve.test_rules import wait_for

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a town",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    "strict": True,
}
CLOCK = {"type": "function", "name": "clock", "parameters": {}}
ASK = {"model": "scripted", "input": "Hello"}
SCRIPTS = {
    "text": "Grüße, 世界! 👋🏽 done",
    "thoughts": "«The user greets. 思考»Hello",
    "call": '⟦weather|{"town": "Zürich ⟪a⟫", "n": [1, {"b": null}]}⟧',
    "all": '«Two towns»I look.\n⟦weather|{"town": "Bern"}⟧⟦weather|{"town": "Rom"}⟧',
    "call without arguments": "⟦weather|⟧",
    "nothing": "",
    "space": " \n ",
}


@pytest.fixture(scope="module")
def scripted() -> Iterator[Stage]:
    """A server that keeps eight responses."""
    with stage(store_responses=8) as one:
        yield one


@pytest.fixture(scope="module")
def client(scripted: Stage) -> Iterator[openai.OpenAI]:
    """A client."""
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0, timeout=60) as one:
        yield one


def post(scripted: Stage, body: Any, path: str = "/v1/responses", **headers: str) -> httpx.Response:
    """A request without the package."""
    return HTTP.post(scripted.url + path, json=body, headers=headers, timeout=60)


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """A response as it is whatever the request."""
    output = [{k: v for k, v in one.items() if k not in ("id", "call_id")} for one in response["output"]]
    usage = {k: v for k, v in response["usage"].items() if k.startswith("input")}
    mine = ("id", "created_at", "completed_at")
    return {k: v for k, v in response.items() if k not in mine} | {"output": output, "usage": usage}


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_whole_and_streamed_are_the_same_response(
    scripted: Stage, client: openai.OpenAI, name: str, finish: str
) -> None:
    """However the output is cut; every response and event is valid; the deltas add up to it; the package agrees."""
    ask = ASK | {"tools": [WEATHER]}
    scripted.plays(SCRIPTS[name], finish)
    whole = post(scripted, ask).json()
    assert validated(Response, whole) == set()
    assert whole["status"] == ("completed" if finish == "stop" else "incomplete")
    for seed in range(8):
        scripted.plays(SCRIPTS[name], finish, seed=seed)
        events = events_of(post(scripted, ask | {"stream": True}))
        assert all(event == data["type"] for event, data in events)
        assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
        for _, data in events:
            assert validated(ResponseStreamEvent, data) == set()
        last = events[-1][1]
        assert last["type"] == f"response.{whole['status']}"
        assert without_ids(last["response"]) == without_ids(whole)
        assert added_up([data for _, data in events]) == last["response"]["output"]
    with client.responses.stream(**ask) as stream:
        for event in stream:
            seen = event
    assert seen.type == f"response.{whole['status']}"
    if finish == "stop":
        final = stream.get_final_response()
        assert final.output_text == "".join(
            part["text"] for one in whole["output"] if one["type"] == "message" for part in one["content"]
        )


def added_up(events: list[Item]) -> list[Item]:
    """The output that the deltas make, of items that were added and parts that were done."""
    output: list[Item] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(output) and event["item"]["status"] == "in_progress"
            output.append(event["item"])
        elif kind == "content_part.added":
            output[-1]["content"].append(event["part"])
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            assert event["item_id"] == output[-1]["id"]
            output[-1]["content"][event["content_index"]]["text"] += event["delta"]
        elif kind == "function_call_arguments.delta":
            output[-1]["arguments"] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == output[-1]["content"][-1]["text"]
        elif kind == "content_part.done":
            assert event["part"] == output[-1]["content"][-1]
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == output[-1]["arguments"]
        elif kind == "output_item.done":
            status = event["item"]["status"]
            assert event["item"] == output[-1] | {"status": status}
            output[-1]["status"] = status
    return output


def test_items_of_a_response(scripted: Stage, client: openai.OpenAI) -> None:
    """Thoughts, text, calls; usage; what was asked comes back."""
    scripted.plays(SCRIPTS["all"])
    answer = client.responses.create(
        **ASK,
        tools=[WEATHER, CLOCK],
        instructions="Be brief",
        metadata={"a": "b"},
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=300,
        reasoning={"effort": "low", "summary": "auto"},
        parallel_tool_calls=False,
        tool_choice={
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "clock"}],
        },
        truncation="auto",
        user="u",
    )
    thoughts, text, first, second = answer.output
    assert thoughts.type == "reasoning" and thoughts.content and thoughts.content[0].text == "Two towns"
    assert text.type == "message" and answer.output_text == "I look.\n"
    assert first.type == second.type == "function_call" and first.call_id != second.call_id
    assert (first.name, first.arguments) == ("weather", '{"town": "Bern"}')
    assert (answer.temperature, answer.top_p, answer.max_output_tokens) == (0.5, 0.9, 300)
    assert answer.metadata == {"a": "b"} and answer.instructions == "Be brief" and answer.user == "u"
    assert answer.reasoning is not None and answer.reasoning.effort == "low"
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens == len("Two towns")
    assert answer.usage.total_tokens == answer.usage.input_tokens + len(SCRIPTS["all"]) + 1
    messages, options, params = scripted.seen
    assert messages == [Message("system", "Be brief"), Message("user", "Hello")]
    assert [tool.name for tool in options.tools] == ["clock"] and options.tool_choice == "required"
    assert not options.parallel_tool_calls and options.reasoning_effort == "low"
    assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.9, 300)


def test_input_reaches_the_model(scripted: Stage, client: openai.OpenAI) -> None:
    """Every kind of item; what an assistant did in a row is one message."""
    scripted.plays("Hi")
    client.responses.create(
        model="scripted",
        input=[
            {"role": "developer", "content": "Be brief"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "t"}],
            },
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
            },
            {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{}"},
            {"type": "function_call", "call_id": "call_2", "name": "clock", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": "sun"},
            {
                "type": "function_call_output",
                "call_id": "call_2",
                "output": [{"type": "input_text", "text": "12"}],
            },
            {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "s"}]},
            {"role": "assistant", "content": "It is"},
            {"role": "assistant", "content": "sunny"},
            {"role": "user", "content": "and?"},
        ],
    )
    calls = (ToolCall("call_1", "weather", "{}"), ToolCall("call_2", "clock", "{}"))
    assert scripted.seen[0] == [
        Message("developer", "Be brief"),
        Message("user", "a"),
        Message("assistant", "I look.", "t", calls),
        Message("tool", "sun", tool_call_id="call_1", name="weather"),
        Message("tool", "12", tool_call_id="call_2", name="clock"),
        Message("assistant", "It is", "s"),
        Message("assistant", "sunny"),
        Message("user", "and?"),
    ]


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "clock"}, "named"),
    ],
)
def test_tool_choice(scripted: Stage, client: openai.OpenAI, given: Any, choice: str) -> None:
    """As the options of the conversation have it, and back as it was."""
    scripted.plays("Hi")
    answer = client.responses.create(**ASK, tools=[WEATHER, CLOCK], tool_choice=given)
    assert scripted.seen[1].tool_choice == choice
    assert answer.to_dict()["tool_choice"] == given


class Town(pydantic.BaseModel):
    """What an answer is parsed as."""

    name: str
    people: int


class Look(pydantic.BaseModel):
    """What a call is parsed as."""

    town: str


def test_structured_output(scripted: Stage, client: openai.OpenAI) -> None:
    """By parse and stream, whose schema reaches the engine; the other formats."""
    scripted.plays('{"name": "Bern", "people": 134506}')
    answer = client.responses.parse(**ASK, text_format=Town)
    assert answer.output_parsed == Town(name="Bern", people=134506)
    structure = scripted.seen[2].structured_output
    assert structure is not None and isinstance(structure.json_schema, dict)
    assert set(structure.json_schema["properties"]) == {"name", "people"}
    with client.responses.stream(**ASK, text_format=Town) as stream:
        assert stream.get_final_response().output_parsed == Town(name="Bern", people=134506)
    whole = post(scripted, ASK | {"text": {"format": {"type": "json_object"}, "verbosity": "low"}}).json()
    assert validated(Response, whole) == set() and whole["text"]["verbosity"] == "low"
    structure = scripted.seen[2].structured_output
    assert structure is not None and structure.json_schema == {"type": "object"}
    post(scripted, ASK | {"text": {"format": {"type": "text"}}})
    assert scripted.seen[2].structured_output is None
    scripted.plays('⟦Look|{"town": "Bern"}⟧')
    tool = openai.pydantic_function_tool(Look)["function"]
    parsed = client.responses.parse(**ASK, tools=[{"type": "function"} | tool], tool_choice="required")
    call = parsed.output[0]
    assert call.type == "function_call" and call.name == "Look"


@pytest.mark.parametrize("more", [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 3}])
def test_logprobs(scripted: Stage, more: dict[str, Any]) -> None:
    """Of the text alone, in the whole response and in the events."""
    scripted.plays("«hm»Hello", sizes=[1])
    whole = post(scripted, ASK | more).json()
    assert validated(Response, whole) == set()
    entries = whole["output"][1]["content"][0]["logprobs"]
    assert len(entries) == len("Hello")
    assert {len(one["top_logprobs"]) for one in entries} == {more.get("top_logprobs", 0)}
    events = [data for _, data in events_of(post(scripted, ASK | more | {"stream": True}))]
    deltas = [one["logprobs"] for one in events if one["type"] == "response.output_text.delta"]
    assert [len(one) for one in deltas] == [1] * 5
    assert [e["logprob"] for one in deltas for e in one] == [e["logprob"] for e in entries]
    for event in events:
        assert validated(ResponseStreamEvent, event) == set()
    plain = post(scripted, ASK).json()
    assert plain["output"][1]["content"][0]["logprobs"] == []


def test_reasoning_effort(scripted: Stage, client: openai.OpenAI) -> None:
    """none turns thoughts off; the others are those that templates know."""
    scripted.plays("Hi")
    for given, reasoning, effort in (
        ("none", False, None),
        ("minimal", None, "low"),
        ("medium", None, "medium"),
        ("xhigh", None, "high"),
    ):
        client.responses.create(**ASK, reasoning={"effort": given})  # type: ignore[arg-type]
        options = scripted.seen[1]
        assert (options.reasoning, options.reasoning_effort) == (reasoning, effort)


def test_truncation(scripted: Stage, client: openai.OpenAI) -> None:
    """The oldest messages go, not the instructions or the last one; without it the request is refused."""
    scripted.plays("Hi")
    talk: Any = []
    for number in range(30):
        talk.append({"role": "user", "content": f"question {number} " + "word " * 20})
        talk.append({"type": "function_call", "call_id": f"c{number}", "name": "clock", "arguments": "{}"})
        talk.append({"type": "function_call_output", "call_id": f"c{number}", "output": "12"})
    ask = {"model": "scripted", "input": talk, "instructions": "Be brief", "max_output_tokens": 50}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**ASK | ask)
    assert caught.value.code == "context_length_exceeded"
    answer = client.responses.create(**ASK | ask, truncation="auto")
    assert answer.usage is not None and answer.usage.input_tokens <= 512 - 50
    messages = scripted.seen[0]
    assert messages[0] == Message("system", "Be brief") and messages[1].role != "tool"
    assert messages[-1].tool_call_id == "c29" and len(messages) > 5
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="scripted", input="word " * 2000, truncation="auto")


def test_stored_responses(scripted: Stage, client: openai.OpenAI) -> None:
    """One goes on from another; each can be asked for, its input too, until it is deleted."""
    scripted.plays("«hm»I look.⟦clock|{}⟧")
    first = client.responses.create(**ASK, instructions="Be brief", tools=[CLOCK])
    call = next(one for one in first.output if one.type == "function_call")
    scripted.plays("Noon")
    second = client.responses.create(
        model="scripted",
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "12"}],
    )
    assert second.previous_response_id == first.id
    assert scripted.seen[0] == [
        Message("user", "Hello"),
        Message("assistant", "I look.", "hm", (ToolCall(call.call_id, "clock", "{}"),)),
        Message("tool", "12", tool_call_id=call.call_id, name="clock"),
    ]
    third = client.responses.create(
        model="scripted",
        input=[
            {"type": "item_reference", "id": first.output[1].id or ""},
            {"role": "user", "content": "so?"},
        ],
        store=False,
    )
    assert scripted.seen[0] == [Message("assistant", "I look."), Message("user", "so?")]
    bare: Any = [{"id": first.output[1].id}, {"role": "user", "content": "so?"}]
    client.responses.create(model="scripted", input=bare, store=False)
    assert scripted.seen[0] == [Message("assistant", "I look."), Message("user", "so?")]
    found = client.responses.retrieve(second.id)
    assert found.to_dict() == second.to_dict()
    assert validated(Response, HTTP.get(f"{scripted.url}/v1/responses/{second.id}").json()) == set()
    pages = list(client.responses.input_items.list(second.id, limit=2))
    assert [one.type for one in pages] == [
        "function_call_output",
        "function_call",
        "message",
        "reasoning",
        "message",
    ]
    path = f"{scripted.url}/v1/responses/{second.id}/input_items"
    page = HTTP.get(path, params={"order": "asc", "limit": 100}).json()
    assert validated(ResponseItemList, page) == set() and not page["has_more"]
    assert [one["id"] for one in page["data"]] == [one.id for one in reversed(pages)]
    client.responses.delete(second.id)
    for missing in (second.id, third.id, "resp_1"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(missing)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**ASK, previous_response_id=second.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
    streamed = client.responses.create(**ASK, stream=True)
    last = list(streamed)[-1]
    assert last.type == "response.completed"
    assert client.responses.retrieve(last.response.id).output_text == "Noon"


def test_background(scripted: Stage, client: openai.OpenAI) -> None:
    """It is answered at once, goes on without the client, and can be cancelled; twice is as good as once."""
    scripted.plays("Hello", "hang")
    response = client.responses.create(**ASK, background=True)
    assert response.status == "in_progress" and response.background
    wait_for(lambda: client.responses.retrieve(response.id).output)
    with pytest.raises(openai.BadRequestError, match="in progress"):
        client.responses.create(**ASK, previous_response_id=response.id)
    left = scripted.engine.left
    cancelled = client.responses.cancel(response.id)
    assert cancelled.status == "cancelled" and scripted.engine.left == left + 1
    assert validated(Response, cancelled.to_dict()) == set()
    assert client.responses.cancel(response.id).to_dict() == cancelled.to_dict()
    scripted.plays("Hello")
    done = client.responses.create(**ASK, background=True)
    wait_for(lambda: client.responses.retrieve(done.id).status == "completed")
    assert client.responses.retrieve(done.id).output_text == "Hello"
    scripted.plays("Hello", error=RuntimeError("secret"))
    broken = client.responses.create(**ASK, background=True)
    wait_for(lambda: client.responses.retrieve(broken.id).status == "failed")
    failed = client.responses.retrieve(broken.id)
    assert failed.error is not None and failed.error.code == "server_error" and "secret" not in str(failed)
    assert validated(Response, failed.to_dict()) == set()
    scripted.plays("Hello", "hang")
    gone = client.responses.create(**ASK, background=True)
    left = scripted.engine.left
    client.responses.delete(gone.id)
    wait_for(lambda: scripted.engine.left == left + 1 and not scripted.service.active)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(gone.id)
    scripted.plays("Hi")
    whole = client.responses.create(**ASK, store=True)
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(whole.id)


def test_streams_of_the_background(scripted: Stage, client: openai.OpenAI) -> None:
    """Who leaves comes back to where it was, during and after; the response does not mind."""
    scripted.plays("Hello there, " * 20, "hang")
    ask: Any = ASK | {"background": True, "stream": True}
    seen = []
    with client.responses.create(**ask) as stream:
        for event in stream:
            seen.append(event)
            if len(seen) == 6:
                break
    assert [event.sequence_number for event in seen] == list(range(6))
    name = seen[0].response.id  # type: ignore[union-attr]
    left = scripted.engine.left
    with client.responses.retrieve(name, stream=True, starting_after=3) as stream:
        again = [next(iter(stream)) for _ in range(2)]
    assert [event.to_dict() for event in again] == [event.to_dict() for event in seen[4:]]
    assert scripted.engine.left == left and client.responses.retrieve(name).status == "in_progress"
    with client.responses.retrieve(name, stream=True, starting_after=5) as stream:
        wait_for(lambda: client.responses.retrieve(name).output)
        client.responses.cancel(name)
        rest = list(stream)
    assert [event.sequence_number for event in rest] == list(range(6, 6 + len(rest)))
    scripted.plays(SCRIPTS["all"])
    with client.responses.create(**ask) as stream:
        whole = list(stream)
    assert whole[-1].type == "response.completed"
    name = whole[-1].response.id
    assert client.responses.retrieve(name).to_dict() == whole[-1].response.to_dict()
    events = events_of(HTTP.get(f"{scripted.url}/v1/responses/{name}?stream=true"))
    assert [data for _, data in events] == [event.to_dict() for event in whole]
    for _, data in events:
        assert validated(ResponseStreamEvent, data) == set()
    with client.responses.stream(response_id=name) as following:
        assert following.get_final_response().output_text == "I look.\n"
    scripted.plays("Hello", error=RuntimeError("secret"))
    with client.responses.create(**ask) as stream:
        assert list(stream)[-1].type == "response.failed"
    path = f"{scripted.url}/v1/responses/{name}?stream=true&starting_after="
    assert events_of(HTTP.get(path + str(len(whole) - 1))) == []
    for wrong in ("x", "-1", "9" * 20):
        assert HTTP.get(path + wrong).json()["error"]["param"] == "starting_after"


def test_draining_ends_what_is_in_the_background() -> None:
    """After its seconds, like every other request."""
    with stage(store_responses=2, drain_seconds=0.1) as scripted:
        scripted.plays("Hello", "hang")
        assert post(scripted, ASK | {"background": True}).status_code == 200
        assert post(scripted, ASK | {"background": True}).status_code == 200
        full = post(scripted, ASK | {"background": True})
        assert full.status_code == 429 and full.headers["retry-after"]
    assert scripted.engine.left >= 2 and not scripted.service.active


def test_keys_own_their_responses(tmp_path: Any) -> None:
    """Another key does not see a response, go on from it, or refer to its items."""
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    one, two = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}
    with stage(store_responses=8, api_key_file=str(keys)) as scripted:
        scripted.plays("Hi")
        made = post(scripted, ASK, **one).json()
        path = f"{scripted.url}/v1/responses/{made['id']}"
        assert HTTP.get(path, headers=one).status_code == 200
        assert HTTP.get(path, headers=two).status_code == 404
        assert HTTP.delete(path, headers=two).status_code == 404
        assert post(scripted, ASK | {"previous_response_id": made["id"]}, **two).status_code == 400
        refer = {"input": [{"type": "item_reference", "id": made["output"][0]["id"]}]}
        assert post(scripted, ASK | refer, **two).status_code == 400
        assert post(scripted, ASK | refer, **one).status_code == 200


def test_nothing_is_kept_unless_the_server_says_so() -> None:
    """What needs a store is refused by name; the rest works without."""
    with stage() as scripted:
        scripted.plays("Hi")
        made = post(scripted, ASK)
        assert made.status_code == 200
        assert HTTP.get(f"{scripted.url}/v1/responses/{made.json()['id']}").status_code == 404
        for name, value in (("store", True), ("background", True), ("previous_response_id", "resp_1")):
            answer = post(scripted, ASK | {name: value})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == name


def stored(name: str, size: int = 0, task: Any = None, owner: str = "") -> Stored:
    """A response of a size."""
    return Stored(owner, {"id": name, "output": [], "text": "a" * size}, [], task)


def test_the_store_has_limits() -> None:
    """On entries and bytes; what was used last stays, and what is being generated."""
    store = ResponseStore(3, 1000)
    running: Any = object()
    assert all(store.put(one) for one in (stored("a"), stored("b", task=running), stored("c")))
    store.get("a", "")
    assert store.put(stored("d")) and len(store) == 3
    with pytest.raises(Exception, match="'c' not found"):
        store.get("c", "")
    assert store.put(stored("e", 700)) and store.bytes <= 1000
    assert store.get("b", "") and store.get("e", "")
    assert not store.put(stored("f", 2000)) and store.bytes <= 1000
    store = ResponseStore(2, 1000)
    assert store.put(stored("a", task=running)) and store.put(stored("b", task=running))
    assert not store.put(stored("c", task=running)) and len(store) == 2
    for number in range(100):
        ended = stored("a", number)
        store.put(ended)
    assert store.holds(ended) and store.bytes < 400


class Word(pydantic.BaseModel):
    """An answer of one word."""

    word: Literal["yes", "no"]


def test_with_an_engine(url: str) -> None:
    """Log-probabilities are those of the text; a schema binds it; many at once, some of them left."""
    ask: Any = {"model": "docs-llama", "input": "The function returns", "temperature": 0}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        answer = client.responses.create(**ask, max_output_tokens=20, top_logprobs=2)
        assert answer.status == "incomplete" and answer.usage and answer.usage.output_tokens == 20
        message = answer.output[0]
        assert message.type == "message" and message.content[0].type == "output_text"
        entries = message.content[0].logprobs or []
        assert "".join(one.token for one in entries) == answer.output_text
        assert all(len(one.top_logprobs) == 2 for one in entries)
        parsed = client.responses.parse(**ask, max_output_tokens=100, text_format=Word)
        assert parsed.output_parsed is not None and parsed.status == "completed"

    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        text = ""
        stream = await client.responses.create(
            **ask | {"input": f"Number {number % 4}"}, max_output_tokens=20, stream=True
        )
        async for event in stream:
            if event.type == "response.output_text.delta":
                text += event.delta
                if number % 3 == 1:
                    await stream.close()
                    break
        return text

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(24)))

    texts = asyncio.run(main())
    for number, text in enumerate(texts):
        whole = texts[next(other for other in range(24) if other % 4 == number % 4 and other % 3 != 1)]
        assert whole.startswith(text) and (len(text) < len(whole) or number % 3 != 1)


def test_long_inputs_take_time_in_proportion(scripted: Stage) -> None:
    """Not as the square of their length: no request blocks the server, which is a thread of this process."""
    scripted.plays("Hi")
    many = [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "a" * 500}]}] * 15_000
    begin = time.process_time()
    answer = post(scripted, ASK | {"input": [*many, {"role": "user", "content": "b"}]})
    assert answer.status_code == 200 and time.process_time() - begin < 5
    assert len(scripted.seen[0][0].reasoning) == 500 * 15_000


def test_async_client_streams_and_leaves(scripted: Stage) -> None:
    """Eight streams at once; who leaves a stream that never ends ends its request."""
    scripted.plays("Hello there")

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as client:

            async def one() -> str:
                async with client.responses.stream(**ASK) as stream:
                    return (await stream.get_final_response()).output_text

            texts = await asyncio.gather(*(one() for _ in range(8)))
            scripted.plays("Hello", "hang")
            left = scripted.engine.left
            stream = await client.responses.create(**ASK, stream=True)
            async for event in stream:
                if event.type == "response.output_text.delta":
                    break
            await stream.close()
            asked = len(scripted.engine.seen)
            waiting = asyncio.ensure_future(client.responses.create(**ASK))
            await asyncio.to_thread(wait_for, lambda: len(scripted.engine.seen) > asked)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await asyncio.to_thread(wait_for, lambda: scripted.engine.left == left + 2)
            return texts

    assert asyncio.run(main()) == ["Hello there"] * 8


def test_errors_within_a_stream(scripted: Stage, client: openai.OpenAI) -> None:
    """An error event, then the response as failed, with what there was."""
    scripted.plays("Hello", error=RuntimeError("secret"))
    events = [data for _, data in events_of(post(scripted, ASK | {"stream": True}))]
    for event in events:
        assert validated(ResponseStreamEvent, event) == set()
    assert [one["type"] for one in events[-2:]] == ["error", "response.failed"]
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    response = events[-1]["response"]
    assert response["output"][0]["content"][0]["text"] == "Hello" and "secret" not in str(events)
    assert response["output"][0]["status"] == "incomplete" and response["status"] == "failed"
    with client.responses.stream(**ASK) as stream:
        assert [event.type for event in stream][-1] == "response.failed"
    scripted.plays("Hello", "abort")
    events = [data for _, data in events_of(post(scripted, ASK | {"stream": True}))]
    assert events[-1]["type"] == "response.failed"


def test_other_errors(scripted: Stage, client: openai.OpenAI) -> None:
    """Before a stream begins, each is a status."""
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(**ASK | {"model": "gpt"})
    assert missing.value.code == "model_not_found"
    scripted.plays("", error=QueueFull("too many requests wait"))
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError):
            client.responses.create(**ASK, stream=stream)
    scripted.plays("Hi", "error", info=ErrorInfo("nan", "logits were not finite"))
    with pytest.raises(openai.InternalServerError):
        client.responses.create(**ASK)


def item(**fields: Any) -> dict[str, Any]:
    """A request with one item."""
    return {"input": [fields]}


def nested(levels: int) -> Any:
    """A schema of so many levels."""
    return {"properties": {"a": nested(levels - 1)}} if levels else {}


FORMAT = {"type": "json_schema", "name": "a", "schema": {}}
BAD: dict[str, dict[str, Any]] = {
    "no input": {"input": None},
    "empty input": {"input": []},
    "input as number": {"input": 1},
    "input of texts": {"input": ["Hello"]},
    "item of nothing": {"input": [{}]},
    "unknown role": item(role="critic", content="a"),
    "message without content": item(role="user"),
    "message without role": item(type="message", content="a"),
    "image": item(role="user", content=[{"type": "input_image", "image_url": "http://a"}]),
    "file": item(role="user", content=[{"type": "input_file", "file_id": "a"}]),
    "text without text": item(role="user", content=[{"type": "input_text"}]),
    "text as number": item(role="user", content=[{"type": "input_text", "text": 1}]),
    "call without name": item(type="function_call", call_id="a", arguments="{}"),
    "call with an object": item(type="function_call", call_id="a", name="b", arguments={}),
    "output without call": item(type="function_call_output", output="a"),
    "output without output": item(type="function_call_output", call_id="a"),
    "image as output": item(type="function_call_output", call_id="a", output=[{"type": "input_image"}]),
    "server's item": item(type="web_search_call", id="a"),
    "unknown reference": item(type="item_reference", id="msg_1"),
    "instructions as list": {"instructions": ["a"]},
    "server's tool": {"tools": [{"type": "web_search"}]},
    "custom tool": {"tools": [{"type": "custom", "name": "a"}]},
    "tool without name": {"tools": [{"type": "function"}]},
    "tool of the chat API": {"tools": [{"type": "function", "function": {"name": "a"}}]},
    "parameters as text": {"tools": [{"type": "function", "name": "a", "parameters": "{}"}]},
    "deep parameters": {"tools": [{"type": "function", "name": "a", "parameters": nested(40)}]},
    "two tools of one name": {"tools": [CLOCK, CLOCK]},
    "unknown choice": {"tools": [CLOCK], "tool_choice": "some"},
    "choice of an unknown tool": {"tools": [CLOCK], "tool_choice": {"type": "function", "name": "b"}},
    "choice of a server's tool": {"tools": [CLOCK], "tool_choice": {"type": "web_search_preview"}},
    "allowed unknown tool": {
        "tools": [CLOCK],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "b"}]},
    },
    "allowed in another mode": {
        "tools": [CLOCK],
        "tool_choice": {"type": "allowed_tools", "mode": "some", "tools": [{"name": "clock"}]},
    },
    "required without tools": {"tool_choice": "required"},
    "unknown format": {"text": {"format": {"type": "xml"}}},
    "format without schema": {"text": {"format": {"type": "json_schema", "name": "a"}}},
    "format without name": {"text": {"format": {"type": "json_schema", "schema": {}}}},
    "deep schema": {"text": {"format": FORMAT | {"schema": nested(40)}}},
    "unknown verbosity": {"text": {"verbosity": "loud"}},
    "unknown effort": {"reasoning": {"effort": "some"}},
    "unknown summary": {"reasoning": {"summary": "long"}},
    "max_output_tokens of 0": {"max_output_tokens": 0},
    "max_output_tokens as text": {"max_output_tokens": "many"},
    "temperature of -1": {"temperature": -1},
    "top_p of 2": {"top_p": 2},
    "top_logprobs of 21": {"top_logprobs": 21},
    "top_logprobs of -1": {"top_logprobs": -1},
    "unknown include": {"include": ["everything"]},
    "unknown truncation": {"truncation": "some"},
    "metadata of numbers": {"metadata": {"a": 1}},
    "much metadata": {"metadata": {str(number): "" for number in range(17)}},
    "long metadata": {"metadata": {"a": "b" * 600}},
    "conversation": {"conversation": "conv_1"},
    "prompt": {"prompt": {"id": "pmpt_1"}},
    "n of 2": {"n": 2},
    "stream as text": {"stream": "yes"},
    "background as text": {"background": "yes"},
    "background without store": {"background": True, "store": False},
    "unknown previous": {"previous_response_id": "resp_1"},
    "long prompt": {"input": "word " * 2000},
}


@pytest.mark.parametrize("name", BAD)
def test_malformed_requests(scripted: Stage, name: str) -> None:
    """400, in the shape of the API, before anything reaches the engine."""
    requests = len(scripted.engine.seen)
    for stream in (False, True):
        answer = post(scripted, {"stream": stream} | ASK | BAD[name])
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
        assert error["type"] == "invalid_request_error"
    assert len(scripted.engine.seen) == requests


@pytest.mark.parametrize(
    "query", ["?limit=0", "?limit=x", "?limit=101", "?order=up", "?after=item_1", "?" + "a=1&" * 40]
)
def test_malformed_queries(scripted: Stage, query: str) -> None:
    """As malformed requests; streams by id are refused by name."""
    scripted.plays("Hi")
    path = f"{scripted.url}/v1/responses/{post(scripted, ASK).json()['id']}"
    assert HTTP.get(f"{path}/input_items{query}").status_code == 400
    assert HTTP.get(f"{path}?stream=true").json()["error"]["param"] == "stream"


def test_input_tokens(scripted: Stage, client: openai.OpenAI) -> None:
    """They are those that a response takes."""
    scripted.plays("Hi")
    count = client.responses.input_tokens.count(
        model="scripted", input="How many? 世界", instructions="Be brief"
    )
    answer = client.responses.create(model="scripted", input="How many? 世界", instructions="Be brief")
    assert answer.usage is not None and count.input_tokens == answer.usage.input_tokens > 5


@pytest.mark.parametrize(
    "fault",
    [
        {"status": "done"},
        {"object": "message"},
        {"usage": {"input_tokens": 1}},
        {"output": [{"type": "message", "id": "a", "role": "assistant", "content": []}]},
        {"tool_choice": "any"},
        {"created_at": "now"},
    ],
)
def test_the_shapes_show_a_wrong_response(scripted: Stage, fault: dict[str, Any]) -> None:
    """Each fault that the package itself accepts."""
    scripted.plays("Hi")
    good = post(scripted, ASK).json()
    assert validated(Response, good | {"new": 1}) == {"new"}
    Response.construct(**good | fault)
    with pytest.raises(pydantic.ValidationError):
        validated(Response, good | fault)
