"""What is asked: prompts of random words with given lengths, or those of a file."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.runtime.errors import UsageError

_TEXT = """time year people way day man thing woman life child world school state family student group country problem hand part place case week
company system program question work government number night point home water room mother area money story fact month lot right study book eye
job word business issue side kind head house service friend father power hour game line end member law car city name president team minute idea
body information back parent face others level office door health person art war history party result change morning reason research girl guy
moment air teacher force education"""
WORDS = _TEXT.split()
"""Words that are one token each, with the space before them, in the vocabularies of most models."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request without its options: `messages` of a chat or `text`; `max_tokens` None = the server's default."""

    messages: list[dict[str, Any]] | None
    text: str | None
    max_tokens: int | None

    def chat(self) -> list[dict[str, Any]]:
        """As messages."""
        return self.messages if self.messages is not None else [{"role": "user", "content": self.text}]

    def completion(self) -> str:
        """As one text."""
        if self.text is not None:
            return self.text
        assert self.messages is not None
        return "\n".join(str(message.get("content") or "") for message in self.messages)


@dataclass(frozen=True)
class Range:
    """A length: one, or any of a range with equal probability."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> Range:
        """``128``, or ``64:256``."""
        match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
        if match is None:
            raise ValueError("expected N or MIN:MAX")
        least = int(match[1])
        most = int(match[2] or least)
        if not 0 < least <= most:
            raise ValueError("expected at least 1, and MIN at most MAX")
        return cls(least, most)

    def draw(self, source: random.Random) -> int:
        """One of them."""
        return source.randint(self.least, self.most)


def random_prompts(
    input_tokens: Range,
    output_tokens: Range,
    prefix_tokens: int,
    prefixes: int,
    seed: int,
    exactly: Callable[[str, int], str] | None = None,
) -> Iterator[Prompt]:
    """Endless prompts of random words, which no cache has seen, behind one of `prefixes` beginnings in turn, which it has.

    Args:
        prefix_tokens: words of the shared beginning, in addition to `input_tokens`.
        exactly: makes a text that has a number of tokens of one that has more words; None = a word is a token.
    """
    source = random.Random(seed)
    cut = exactly or (lambda text, count: " ".join(text.split()[:count]))

    def text(count: int) -> str:
        return cut(
            " ".join(source.choices(WORDS, k=count + (0 if exactly is None else count // 4 + 8))), count
        )

    shared = [text(prefix_tokens) for _ in range(prefixes)] if prefix_tokens else [""]
    for number in itertools.count():
        own = text(input_tokens.draw(source))
        prefix = shared[number % len(shared)]
        yield Prompt(None, f"{prefix} {own}" if prefix else own, output_tokens.draw(source))


def file_prompts(path: Path, output_tokens: Range | None, seed: int) -> list[Prompt]:
    """The prompts of a file, in a random order: one JSON object per line, with ``messages`` or ``prompt`` and optionally ``max_tokens``; or a
    list of conversations as ShareGPT has them, of which each has the first question, and as many tokens as its answer has words.

    output_tokens: instead of what the file says.

    Raises:
        UsageError: a file that cannot be read, or has no prompts; the message has the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if text.lstrip().startswith("["):
        try:
            entries = [(f"entry {number}", entry) for number, entry in enumerate(json.loads(text))]
        except ValueError as error:
            raise UsageError(f"{path} is not JSON: {error}") from error
    else:
        entries = []
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                try:
                    entries.append((f"line {number}", json.loads(line)))
                except ValueError as error:
                    raise UsageError(f"{path}, line {number}: not JSON: {error}") from error
    source = random.Random(seed)
    prompts = []
    for where, entry in entries:
        prompt = _prompt(f"{path}, {where}", entry)
        if prompt is not None:
            tokens = prompt.max_tokens if output_tokens is None else output_tokens.draw(source)
            prompts.append(Prompt(prompt.messages, prompt.text, tokens))
    if not prompts:
        raise UsageError(
            f"{path} has no prompts: expected lines with 'messages' or 'prompt', or ShareGPT's JSON"
        )
    source.shuffle(prompts)
    return prompts


def _prompt(where: str, entry: Any) -> Prompt | None:
    """The prompt of an entry; None for a conversation that has no question with an answer."""
    if isinstance(entry, str):
        return Prompt(None, entry, None)
    if not isinstance(entry, dict):
        raise UsageError(f"{where}: expected an object, got {type(entry).__name__}")
    limit = entry.get("max_tokens")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise UsageError(f"{where}: max_tokens must be an integer of at least 1, got {limit!r}")
    if isinstance(entry.get("messages"), list) and entry["messages"]:
        if not all(isinstance(message, dict) for message in entry["messages"]):
            raise UsageError(f"{where}: messages must be objects")
        return Prompt(entry["messages"], None, limit)
    if isinstance(entry.get("prompt"), str):
        return Prompt(None, entry["prompt"], limit)
    turns = entry.get("conversations", entry.get("conversation"))
    if isinstance(turns, list):
        said = [turn for turn in turns if isinstance(turn, dict) and isinstance(turn.get("value"), str)]
        if len(said) < 2 or said[0].get("from") not in ("human", "user"):
            return None
        words = len(said[1]["value"].split())
        return None if not words else Prompt(None, said[0]["value"], limit or words)
    raise UsageError(
        f"{where}: expected 'messages', 'prompt' or 'conversations', got {', '.join(map(repr, entry)) or 'nothing'}"
    )
