"""LiteLLM as a client: completions, conversations, streams, tools, and both other APIs, as its users configure them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import httpx
import litellm
import pytest

from gristmill import LLM
from gristmill.runtime.completion import Chunk
from gristmill.runtime.sampling_params import SamplingParams
from tests.serve.scripted import ScriptedEngine
from tests.serve.server import MODEL, service_of, serving
from tests.serve.test_rules import wait_for

WORDS = ["Two", " words", " and", " more", "."]
HELLO = [{"role": "user", "content": "Hello"}]


def say(ids: Sequence[int], params: SamplingParams) -> list[Chunk]:
    """The words, up to max_tokens."""
    words = WORDS[: params.max_tokens]
    end = "stop" if len(words) == len(WORDS) else "length"
    return [Chunk(0, (i,), word, end if i == len(words) - 1 else None) for i, word in enumerate(words)]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server that says the words."""
    llm = LLM(MODEL, dtype="fp32", device="cpu", warm="off")
    with serving(service_of(llm), lambda service: ScriptedEngine(say)) as address:
        wait_for(lambda: httpx.get(f"{address}/ready").status_code == 200)
        yield address


def test_conversation(url: str) -> None:
    """Whole and streamed."""
    options = {"model": "openai/docs-llama", "api_base": f"{url}/v1", "api_key": "none", "messages": HELLO}
    whole = litellm.completion(**options)
    assert whole.choices[0].message.content == "".join(WORDS)
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens == len(WORDS)
    parts = list(litellm.completion(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "".join(WORDS)
    cut = litellm.completion(**options, max_tokens=2)
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("Two words", "length")


def test_async_conversations(url: str) -> None:
    """Twenty at once."""

    async def main() -> list[str]:
        answers = await asyncio.gather(
            *(
                litellm.acompletion(
                    model="hosted_vllm/docs-llama", api_base=f"{url}/v1", api_key="none", messages=HELLO
                )
                for _ in range(20)
            )
        )
        return [one.choices[0].message.content for one in answers]

    assert set(asyncio.run(main())) == {"".join(WORDS)}


def test_completion(url: str) -> None:
    """The older API."""
    answer = litellm.text_completion(
        model="text-completion-openai/docs-llama",
        api_base=f"{url}/v1",
        api_key="none",
        prompt="Hello",
        max_tokens=3,
    )
    assert answer.choices[0].text == "Two words and"


def test_anthropic(url: str) -> None:
    """Anthropic's API."""
    answer = litellm.completion(
        model="anthropic/docs-llama", api_base=url, api_key="none", messages=HELLO, max_tokens=100
    )
    assert answer.choices[0].message.content == "".join(WORDS)
    assert answer.choices[0].finish_reason == "stop"


def test_errors_are_known(url: str) -> None:
    """LiteLLM's own exceptions, by the status and the code."""
    with pytest.raises(litellm.NotFoundError, match="another"):
        litellm.completion(model="openai/another", api_base=f"{url}/v1", api_key="none", messages=HELLO)
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(
            model="openai/docs-llama", api_base=f"{url}/v1", api_key="none", messages=HELLO, temperature=-3
        )
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(
            model="openai/docs-llama",
            api_base=f"{url}/v1",
            api_key="none",
            messages=[{"role": "user", "content": "word " * 20000}],
        )
