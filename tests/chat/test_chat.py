"""`LLM.chat` and `AsyncEngine.chat`: answers by a template, whole and streamed; required calls parse by construction."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from gristmill import LLM, AsyncEngine, SamplingParams, StructuredOutput
from gristmill.runtime.chat.chat import Chat
from gristmill.runtime.chat.conversation import ChatOptions, Message, Tool
from gristmill.runtime.errors import UsageError
from tests.chat.test_template import CHATML
from tests.runtime.oracle import LLAMA, MODELS

TOOLS = (
    Tool(
        "look",
        "",
        {
            "type": "object",
            "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["n"],
            "additionalProperties": False,
        },
    ),
    Tool("wait", "", {"type": "object", "properties": {}, "additionalProperties": False}),
)
TALK = [{"role": "user", "content": "The function returns"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A model with a template."""
    folder = tmp_path_factory.mktemp("model")
    for file in (MODELS / LLAMA).iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(CHATML)
    return LLM(folder, dtype="fp32", device="cpu", warm="off", max_seqs=4)


def test_an_answer(llm: LLM) -> None:
    """The completion of the rendered prompt; streamed and awaited the same; a next turn takes the message."""
    answer = llm.chat(TALK, SamplingParams(max_tokens=8))
    prompt = llm.conversations.encode([Message("user", "The function returns")])
    [plain] = llm.generate([prompt], SamplingParams(max_tokens=8))
    assert answer.message.content == plain.text
    assert (answer.finish_reason, answer.prompt_tokens, answer.output_tokens) == ("length", len(prompt), 8)
    parts = list(llm.stream_chat(TALK, SamplingParams(max_tokens=8)))
    assert "".join(part.delta.content for part in parts) == plain.text
    assert parts[-1].finish_reason == "length"
    again = llm.chat(
        [*TALK, answer.message, {"role": "user", "content": "And?"}], SamplingParams(max_tokens=2)
    )
    assert again.prompt_tokens > answer.prompt_tokens

    async def main() -> str:
        async with AsyncEngine(llm) as engine:
            return (await engine.chat(TALK, SamplingParams(max_tokens=8))).message.content

    assert asyncio.run(main()) == plain.text


@pytest.mark.parametrize("name", ["hermes", "llama3"])
@pytest.mark.parametrize("choice", ["required", "named"])
def test_required_calls_parse_by_construction(llm: LLM, name: str, choice: str) -> None:
    """Of a model that knows no tools, at a high temperature."""
    chat = Chat(llm.path, llm.tokenizer, output_format=name)
    options = ChatOptions(
        tools=TOOLS,
        tool_choice=choice,
        tool_name="wait" if choice == "named" else "",
        parallel_tool_calls=False,
        reasoning=False,  # type: ignore[arg-type]
    )
    llm._conversations = chat
    try:
        for seed in range(4):
            answer = llm.chat(TALK, SamplingParams(max_tokens=120, temperature=1.5, seed=seed), options)
            [call] = answer.message.tool_calls
            assert answer.finish_reason == "tool_calls"
            assert answer.message.content == ""
            arguments = json.loads(call.arguments)
            assert call.name in (("wait",) if choice == "named" else ("look", "wait"))
            assert arguments == {} if call.name == "wait" else 0 <= arguments["n"] <= 9
    finally:
        llm._conversations = None


def test_a_response_format_after_a_thought(llm: LLM) -> None:
    """The thought is free, the answer is bound."""
    llm._conversations = Chat(
        llm.path, llm.tokenizer, template=CHATML + "{{ '<think>' }}", output_format="think"
    )
    try:
        wanted = SamplingParams(
            max_tokens=400,
            temperature=1.0,
            seed=3,
            structured_output=StructuredOutput(choice=["yes", "no"]),
            logit_bias={},
        )
        answer = llm.chat(TALK, wanted)
        if answer.finish_reason == "stop":
            assert answer.message.content in ("yes", "no")
        assert answer.reasoning_tokens > 0
    finally:
        llm._conversations = None


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one"),
        ("hello", "list"),
        ([{"role": "robot", "content": ""}], "role"),
        ([{"role": "user", "content": 5}], "content"),
        ([{"role": "user", "text": "x"}], "text"),
        ([{"role": "assistant", "tool_calls": [{"name": "x"}]}], "tool call"),
    ],
)
def test_wrong_messages(llm: LLM, messages: object, message: str) -> None:
    """The error says what is expected."""
    with pytest.raises(UsageError, match=message):
        llm.chat(messages)  # type: ignore[arg-type]


def test_a_model_without_a_template(tmp_path: Path) -> None:
    """Named, with what to do."""
    with pytest.raises(UsageError, match="chat_template"):
        LLM(MODELS / LLAMA, dtype="fp32", device="cpu", warm="off").chat(TALK)
