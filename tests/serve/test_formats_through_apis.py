"""Formats of models through every API: what a model writes, cut at random, comes out the same everywhere, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic.types import Message as PublishedMessage
from anthropic.types import RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

from gristmill.runtime.chat.chat import Chat
from tests.serve.server import MODEL
from tests.serve.shapes import events_of, validated
from tests.serve.stage import HTTP, Stage, stage

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ARGUMENTS = [
    {"town": "Zürich </tool_call>", "note": 'a "quote" and 世界 👋🏽'},
    {"town": "Rom", "days": [1, {"n": None}]},
]
CALLS = "\n".join(
    f"<tool_call>\n{json.dumps({'name': 'look', 'arguments': one}, ensure_ascii=False)}\n</tool_call>"
    for one in ARGUMENTS
)
THOUGHT, TEXT = "Two towns: 1 < 2, <tool is no tag>.", "I look, é 👋🏽."
SCRIPT = f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}\n\n{CALLS}\n"
SCHEMA = {"type": "object", "properties": {"town": {"type": "string"}}}
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def scripted() -> Iterator[Stage]:
    """A server whose model has the format of Hermes."""
    with stage(lambda tokenizer: Chat(MODEL, tokenizer, template=TEMPLATE, output_format="hermes")) as one:
        yield one


def asked(scripted: Stage, path: str, body: dict[str, Any], whole: Any, event: Any) -> tuple[Any, list[Any]]:
    """(answer, data of the events), all valid."""
    answer = HTTP.post(f"{scripted.url}/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    validated(whole, answer.json())
    streamed = HTTP.post(f"{scripted.url}/v1/{path}", json=body | {"stream": True})
    events = [data for _, data in events_of(streamed) if data != "[DONE]"]
    for data in events:
        validated(event, data)
    return answer.json(), events


def of_chat(scripted: Stage) -> list[Any]:
    """(thoughts, text, names and arguments of calls) by the chat API, whole and streamed."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
    body = {"messages": HELLO, "tools": tools}
    answer, parts = asked(scripted, "chat/completions", body, ChatCompletion, ChatCompletionChunk)
    message = answer["choices"][0]["message"]
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message["tool_calls"]]
    deltas = [part["choices"][0]["delta"] for part in parts]
    streamed: dict[int, list[str]] = {}
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        streamed.setdefault(call["index"], [call["function"].get("name", ""), ""])
        streamed[call["index"]][1] += call["function"]["arguments"]
    added = ["".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning_content", "content")]
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    return [
        [message["reasoning_content"], message["content"], calls],
        [*added, [tuple(call) for _, call in sorted(streamed.items())]],
    ]


def of_messages(scripted: Stage) -> list[Any]:
    """The same by Anthropic's."""
    body = {"messages": HELLO, "max_tokens": 400, "thinking": {"type": "adaptive"}}
    body["tools"] = [{"name": "look", "input_schema": SCHEMA}]
    answer, events = asked(scripted, "messages", body, PublishedMessage, RawMessageStreamEvent)
    thought, text, *calls = answer["content"]
    assert answer["stop_reason"] == "tool_use"
    deltas: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_delta" and event["delta"]["type"] != "signature_delta":
            [(_, piece)] = [pair for pair in event["delta"].items() if pair[0] != "type"]
            deltas[event["index"]] = deltas.get(event["index"], "") + piece
    names = [
        e["content_block"]["name"] for e in events if e.get("content_block", {}).get("type") == "tool_use"
    ]
    whole = [(one["name"], json.dumps(one["input"], ensure_ascii=False)) for one in calls]
    inputs = [json.dumps(json.loads(deltas[number]), ensure_ascii=False) for number in (2, 3)]
    return [
        [thought["thinking"], text["text"], whole],
        [deltas[0], deltas[1], list(zip(names, inputs, strict=True))],
    ]


def of_responses(scripted: Stage) -> list[Any]:
    """The same by OpenAI's responses."""
    body = {"input": "Hello", "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}]}
    answer, events = asked(scripted, "responses", body, Response, ResponseStreamEvent)
    found = []
    for response in (answer, events[-1]["response"]):
        thought, text, *calls = response["output"]
        pairs = [(one["name"], one["arguments"]) for one in calls]
        found.append([thought["content"][0]["text"], text["content"][0]["text"], pairs])
    return found


@pytest.mark.parametrize("api", [of_chat, of_messages, of_responses])
def test_every_api_has_the_same_message(scripted: Stage, api: Any) -> None:
    """Thoughts, text and calls, with arguments that contain the closing tag and characters of several bytes."""
    calls = [("look", json.dumps(one, ensure_ascii=False)) for one in ARGUMENTS]
    for seed in range(8):
        scripted.plays(SCRIPT, seed=seed)
        for found in api(scripted):
            thought, text, pairs = found
            assert (thought, text) == (THOUGHT, TEXT)
            assert [(name, json.loads(arguments)) for name, arguments in pairs] == [
                (name, json.loads(arguments)) for name, arguments in calls
            ]


def test_a_call_goes_back_as_it_came(scripted: Stage) -> None:
    """The answer to a call, by each API, in the prompt of the next turn."""
    scripted.plays(SCRIPT)
    url = scripted.url
    look: Any = {"name": "look", "input_schema": SCHEMA}
    ask = {"messages": HELLO, "max_tokens": 99, "tools": [look], "thinking": {"type": "adaptive"}}
    content = HTTP.post(f"{url}/v1/messages", json=ask).json()["content"]
    results = [
        {"type": "tool_result", "tool_use_id": one["id"], "content": "sun"}
        for one in content
        if one["type"] == "tool_use"
    ]
    turn = [*HELLO, {"role": "assistant", "content": content}, {"role": "user", "content": results}]
    assert HTTP.post(f"{url}/v1/messages", json=ask | {"messages": turn}).status_code == 200
    first = scripted.engine.seen[-1][0]
    tool = {"type": "function", "name": "look", "parameters": SCHEMA}
    output = HTTP.post(f"{url}/v1/responses", json={"input": HELLO, "tools": [tool]}).json()["output"]
    answers = [
        {"type": "function_call_output", "call_id": one["call_id"], "output": "sun"}
        for one in output
        if one["type"] == "function_call"
    ]
    body = {"input": [*HELLO, *output, *answers], "tools": [tool]}
    assert HTTP.post(f"{url}/v1/responses", json=body).status_code == 200
    assert scripted.engine.seen[-1][0] == first
    text = scripted.service.tokenizer.decode(first, False)
    assert TEXT in text and text.count("<tool_call>") == 2 and text.count("sun") == 2


OPEN = '<tool_call>\n{"name": "look", "arguments": {"town": "Zü'


@pytest.mark.parametrize(
    ("text", "stop", "reasons"),
    [
        (OPEN, "rich", ("stop", "stop_sequence", "incomplete")),
        (f"{CALLS}\n{OPEN}", "rich", ("stop", "stop_sequence", "incomplete")),
        (OPEN[: OPEN.index("{", 20)], "{", ("stop", "stop_sequence", "incomplete")),
        (CALLS.removesuffix("</tool_call>"), "</tool_call>", ("tool_calls", "tool_use", "completed")),
        (OPEN, 7, ("stop", "end_turn", "incomplete")),
        (f"{CALLS}\n{OPEN}", None, ("stop", "end_turn", "incomplete")),
        (CALLS, 7, ("tool_calls", "tool_use", "completed")),
    ],
)
def test_a_stop_within_a_call(
    scripted: Stage, text: str, stop: str | int | None, reasons: tuple[str, str, str]
) -> None:
    """A string or a token. What is cut is no call to make, in any API, whole and streamed."""
    look = {"name": "look", "input_schema": SCHEMA}
    stops = {"stop": stop} if isinstance(stop, str) else {}
    messages = {"messages": HELLO, "max_tokens": 400, "tools": [look], "stop_sequences": [*stops.values()]}
    asks: list[tuple[str, dict[str, Any], Any, Any]] = [
        ("chat/completions", WAYS["chat/completions"] | stops, ChatCompletion, ChatCompletionChunk),
        ("messages", messages, PublishedMessage, RawMessageStreamEvent),
        ("responses", WAYS["responses"] | stops, Response, ResponseStreamEvent),
    ]
    for seed in range(4):
        scripted.plays(text, stop_reason=stop, seed=seed)
        (chat, parts), (message, events), (response, steps) = (asked(scripted, *ask) for ask in asks)
        finish, reason, status = reasons
        assert chat["choices"][0]["finish_reason"] == parts[-1]["choices"][0]["finish_reason"] == finish
        [streamed] = [one["delta"]["stop_reason"] for one in events if one["type"] == "message_delta"]
        assert message["stop_reason"] == streamed == reason
        for output in (response["output"], steps[-1]["response"]["output"]):
            assert [one["status"] for one in output] == ["completed"] * (len(output) - 1) + [status]


ANSWER = {
    "type": "object",
    "properties": {"said": {"type": "string"}},
    "required": ["said"],
    "additionalProperties": False,
}
WAYS: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "messages": HELLO,
        "tools": [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}},
    },
    "responses": {
        "input": "Hello",
        "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}],
        "text": {"format": {"type": "json_schema", "name": "answer", "schema": ANSWER}},
    },
    "messages": {
        "messages": HELLO,
        "max_tokens": 400,
        "tools": [{"name": "look", "input_schema": SCHEMA}],
        "output_config": {"format": {"type": "json_schema", "schema": ANSWER}},
    },
}
"""Tools beside a format of the answer, by every API."""


@pytest.mark.parametrize("path", WAYS)
def test_calls_or_an_answer_in_its_format(scripted: Stage, path: str) -> None:
    """The engine gets a grammar of both; an answer that quotes a call's tag is text, and calls are calls."""
    for text, called in ((json.dumps({"said": f"<think> {CALLS}"}), False), (CALLS, True)):
        scripted.plays(text)
        answer = HTTP.post(f"{scripted.url}/v1/{path}", json=WAYS[path])
        assert answer.status_code == 200, answer.text
        structure = scripted.engine.seen[-1][1].structured_output
        assert structure is not None
        assert structure.grammar is not None
        assert '"said"' in structure.grammar
        assert '"town"' in structure.grammar
        kinds, content = _message(path, answer.json())
        assert content == ("" if called else text)
        assert kinds == ["look", "look"] * called


def _message(path: str, answer: dict[str, Any]) -> tuple[list[str], str]:
    """(names of the calls, text) of an answer by any of the APIs."""
    if path == "messages":
        blocks = answer["content"]
        return [one["name"] for one in blocks if one["type"] == "tool_use"], "".join(
            one["text"] for one in blocks if one["type"] == "text"
        )
    if path == "responses":
        items = answer["output"]
        texts = [part["text"] for one in items if one["type"] == "message" for part in one["content"]]
        return [one["name"] for one in items if one["type"] == "function_call"], "".join(texts)
    message = answer["choices"][0]["message"]
    return [one["function"]["name"] for one in message.get("tool_calls", ())], message["content"] or ""


@pytest.mark.parametrize("path", WAYS)
@pytest.mark.parametrize("name", ["think", "glm"])
def test_tools_that_a_format_cannot_bind(name: str, path: str) -> None:
    """400 in the shape of the API, naming the tool or the format, before anything reaches the engine; not strict, they are served."""
    schema = {"type": "object", "properties": {"town": {"type": "string", "pattern": "^[A-Z]"}}}
    with stage(lambda tokenizer: Chat(MODEL, tokenizer, template=TEMPLATE, output_format=name)) as one:
        for strict in (True, False):
            body = {
                key: value for key, value in WAYS[path].items() if key in ("messages", "input", "max_tokens")
            }
            tool: dict[str, Any] = {"name": "look", "strict": strict}
            tool |= {"input_schema" if path == "messages" else "parameters": schema}
            if path == "responses":
                tool["type"] = "function"
            body["tools"] = [{"type": "function", "function": tool} if path == "chat/completions" else tool]
            one.plays("Hi")
            answer = HTTP.post(f"{one.url}/v1/{path}", json=body)
            assert answer.status_code == (400 if strict else 200), answer.text
            assert len(one.engine.seen) == (0 if strict else 1)
            if strict:
                error = answer.json()["error"]
                assert error["type"] == "invalid_request_error"
                assert "strict" in error["message"]
                assert ("'look'" if name == "glm" else "think") in error["message"]
