"""Messages of gpt-oss, rendered by openai-harmony with the model's own vocabulary (LiteLLM carries it), are what our parser makes of them."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import openai_harmony
import pytest
from openai_harmony import HarmonyEncoding, HarmonyEncodingName, Message, Role

from gristmill.runtime.chat.conversation import ChatOptions, Tool
from gristmill.runtime.chat.formats import find_format

VOCABULARY = "litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790"
"""o200k_base, under the name that tiktoken gives it in its cache."""
WORDS = [
    "The sun",
    " shines",
    "\n\n",
    "é☃\U0001f600",
    " to=functions.look",
    "</tool_call>",
    '{"a": 1}',
    "to=",
    " <",
    "|>",
    "{}",
    "\\",
    "t",
]
NAMES = ("look", "find.all-2")


@pytest.fixture(scope="module")
def encoding(tmp_path_factory: pytest.TempPathFactory) -> HarmonyEncoding:
    folder = tmp_path_factory.mktemp("encodings")
    found = importlib.util.find_spec("litellm")
    assert found is not None and found.origin is not None
    shutil.copy(Path(found.origin).parent / VOCABULARY, folder / "o200k_base.tiktoken")
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(folder)
    try:
        return openai_harmony.load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    finally:
        del os.environ["TIKTOKEN_ENCODINGS_BASE"]


def message(rng: random.Random, kind: str) -> Message:
    text = "".join(rng.choices(WORDS, k=rng.randint(1, 6)))
    said = Message.from_role_and_content(Role.ASSISTANT, text)
    if kind == "call":
        arguments = json.dumps(
            {text: rng.choice([text, 7, [text], {"a": text}])}, ensure_ascii=rng.random() < 0.5
        )
        said = Message.from_role_and_content(Role.ASSISTANT, arguments)
        said = said.with_recipient(f"functions.{rng.choice(NAMES)}").with_content_type("<|constrain|>json")
    return said.with_channel("commentary" if kind == "call" else kind)


def parsed(encoding: HarmonyEncoding, tokens: list[int], pieces: int) -> dict[str, Any]:
    """What our parser makes of tokens that come so many at a time, as whole characters."""
    parser = find_format("", "harmony").parser(
        ChatOptions(tools=tuple(Tool(name, "", {}) for name in NAMES)), ""
    )
    content, reasoning, calls = "", "", list[list[str]]()
    sent = 0
    for end in (*range(pieces, len(tokens), pieces), len(tokens), 0):
        text = _whole(encoding, tokens[:end])
        part = parser.push(text[sent:]) if end else parser.finish()
        sent = len(text)
        content, reasoning = content + part.content, reasoning + part.reasoning
        for call in part.calls:
            if call.name:
                calls.append([call.name, ""])
            calls[-1][1] += call.arguments
    return {"content": content, "reasoning": reasoning, "calls": calls}


def _whole(encoding: HarmonyEncoding, tokens: list[int]) -> str:
    """The text of tokens up to the last whole character."""
    return str(encoding.decode(tokens)).rstrip("\ufffd")


@pytest.mark.parametrize("seed", range(200))
def test_what_harmony_renders_is_parsed(encoding: HarmonyEncoding, seed: int) -> None:
    rng = random.Random(seed)
    kinds = (
        ["analysis"] * rng.randint(0, 2)
        + ["commentary"] * rng.randint(0, 1)
        + [rng.choice(["call", "final"])]
    )
    messages = [message(rng, kind) for kind in kinds]
    tokens: list[int] = []
    for one in messages:
        tokens += encoding.render(one)
    start = encoding.encode("<|start|>assistant", allowed_special="all")
    assert tokens[: len(start)] == start
    tokens = tokens[len(start) :]  # which the prompt ends with
    again = encoding.parse_messages_from_completion_tokens(tokens, Role.ASSISTANT)
    assert [one.content[0].text for one in again] == [one.content[0].text for one in messages]
    texts = [(kind, one.content[0].text, one.recipient) for kind, one in zip(kinds, messages, strict=True)]
    expected = {
        "content": "".join(text for kind, text, _ in texts if kind in ("commentary", "final")),
        "reasoning": "".join(text for kind, text, _ in texts if kind == "analysis"),
        "calls": [[str(to).removeprefix("functions."), text] for kind, text, to in texts if kind == "call"],
    }
    for pieces in (1, 3, len(tokens)):
        assert parsed(encoding, tokens, pieces) == expected
