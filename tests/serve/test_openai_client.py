"""The `openai` package through the routes of OpenAI's API."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import httpx
import openai
import pytest

from gristmill import LLM
from gristmill.serve import generation

PROMPT = "The function returns"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    """A client."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def test_completion_is_what_the_engine_generates(client: openai.OpenAI) -> None:
    """Greedy text, its usage, its end."""
    answer = client.completions.create(model="docs-llama", prompt=PROMPT, max_tokens=12, temperature=0)
    assert answer.choices[0].text == " a copy of the input.\n\nThe return value is"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_streamed_completion_is_the_same(client: openai.OpenAI) -> None:
    """Streamed and whole answers are equal, with usage in the last part."""
    whole = client.completions.create(model="docs-llama", prompt=PROMPT, max_tokens=12, temperature=0)
    parts = list(
        client.completions.create(
            model="docs-llama",
            prompt=PROMPT,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text
    assert parts[-1].usage == whole.usage
    assert [part.choices[0].finish_reason for part in parts if part.choices][-1] == "length"


def test_chat(client: openai.OpenAI) -> None:
    """A conversation, whole and streamed."""
    whole = client.chat.completions.create(
        model="docs-llama", messages=HELLO, max_tokens=10, temperature=0, logprobs=True, top_logprobs=2
    )
    parts = list(
        client.chat.completions.create(
            model="docs-llama", messages=HELLO, max_tokens=10, temperature=0, stream=True
        )
    )
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content
    assert parts[0].choices[0].delta.role == "assistant"
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert "".join(one.token for one in logprobs.content) == text
    assert all(len(one.top_logprobs) == 2 for one in logprobs.content)


def test_parts_have_their_least_interval(
    client: openai.OpenAI, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request's `stream_interval_ms`: what comes meanwhile is one part, by every route, and nothing is lost. An interval lasts here until the
    engine has ended the request."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        while llm.engine.has_unfinished():
            await asyncio.sleep(0.005)

    monkeypatch.setattr(generation, "asyncio", SimpleNamespace(sleep=sleep, to_thread=asyncio.to_thread))
    body = {"model": "docs-llama", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
    for path, more in (
        ("completions", {"prompt": PROMPT}),
        ("chat/completions", {"messages": HELLO}),
        ("responses", {"input": "Hello", "max_output_tokens": 60}),
        ("messages", {"messages": HELLO}),
    ):
        texts = []
        for interval in (0, 300):
            slept.clear()
            asked = body | more | {"stream_interval_ms": interval}
            with httpx.stream("POST", f"{client.base_url}{path}", json=asked, timeout=60) as response:
                parts = [text for line in response.iter_lines() if (text := _added(line))]
            texts.append("".join(parts))
            if not interval:
                assert not slept
        assert texts[0] == texts[1]
        # After the first interval there is the rest, whose last tokens may be on their way.
        assert slept in ([0.3], [0.3, 0.3]) and len(parts) <= len(slept) + 1, (path, parts)


def _added(line: str) -> str:
    """The text that an event of any of the APIs adds."""
    if not line.startswith("data: {"):
        return ""
    data = json.loads(line[6:])
    if "choices" in data:
        [choice] = data["choices"]
        return str(choice.get("text") or choice.get("delta", {}).get("content") or "")
    if data["type"] == "content_block_delta":
        return str(data["delta"].get("text", ""))
    return str(data["delta"]) if data["type"] == "response.output_text.delta" else ""


def test_async_client_and_cancellation(url: str) -> None:
    """Sixteen streams at once; one is left early, and the others go on."""

    async def one(client: openai.AsyncOpenAI, number: int) -> int:
        count = 0
        stream = await client.completions.create(
            model="docs-llama",
            prompt=[1 + number] * 4,
            max_tokens=20,
            stream=True,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        async for _ in stream:
            count += 1
            if number == 3 and count == 2:
                await stream.close()
                return -1
        return count

    async def main() -> list[int]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(16)))

    counts = asyncio.run(main())
    assert counts[3] == -1
    assert all(count >= 1 for number, count in enumerate(counts) if number != 3)


@pytest.mark.parametrize(
    ("values", "status", "param"),
    [
        ({"model": "another"}, 404, "model"),
        ({"temperature": -1}, 400, "temperature"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"n": 1000}, 400, "n"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [10**9]}, 400, "prompt"),
        ({"logprobs": 99}, 400, "logprobs"),
        ({"extra_body": {"top_k": "many"}}, 400, "top_k"),
        ({"prompt": "word " * 20000}, 400, None),
        ({"logit_bias": {"5": 1e300}}, 400, None),
        ({"extra_body": {"repetition_penalty": 1e-300}}, 400, None),
        ({"extra_body": {"guided_choice": ["a"]}}, 400, "guided_choice"),
        ({"extra_body": {"guided_json": {}}}, 400, "guided_json"),
        ({"extra_body": {"functions": [{"name": "f"}]}}, 400, "functions"),
        ({"extra_body": {"structured_outputs": {"jsn": {}}}}, 400, "structured_outputs"),
    ],
)
def test_errors_have_the_shape_of_the_api(
    client: openai.OpenAI, values: dict[str, object], status: int, param: str | None
) -> None:
    """Status, message and field of what is wrong."""
    given = {"model": "docs-llama", "prompt": PROMPT, "max_tokens": 4} | values
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(**given)  # type: ignore[call-overload]
    assert caught.value.status_code == status
    assert caught.value.message
    assert caught.value.param == param
