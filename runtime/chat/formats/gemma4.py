"""Calls as ``<|tool_call>call:name{key:value,...}<tool_call|>``, thoughts in ``<|channel>thought ... <channel|>``: Gemma 4.

Keys are bare, and so are numbers, booleans and null; texts stand raw between two marks ``<|"|>``; objects and arrays nest. A grammar asks for JSON in
the same place, which the parser takes as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from gristmill.runtime.chat.conversation import ChatOptions, Tool
from gristmill.runtime.chat.formats import ChatFormat
from gristmill.runtime.chat.formats._bodies import LONGEST_HEAD, Piece, State, Strings, held, named
from gristmill.runtime.chat.formats._structure import call_of_each, chosen_tools, required_calls, thought_rule
from gristmill.runtime.chat.formats._tags import TagParser, Tags
from gristmill.runtime.grammar_parts import text_part
from gristmill.runtime.structured_output import StructuredOutput

HEAD = re.compile(r"\s*call:\s*(?P<name>[^\s{]+)\s*(?=\{)")
OPENING, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
THINK = ("<|channel>thought", "<channel|>")
BARE = {"None": "null", "True": "true", "False": "false"}
"""Values as Python writes them."""


class Arguments:
    """Turns the text of an object, as it grows, into JSON text."""

    def __init__(self) -> None:
        self._text = ""  # that is not yet read
        self._open: list[str] = []  # what ends the containers around
        self._read: Callable[[list[str]], State | None] = self._begin
        self._quoted = Strings()

    def feed(self, text: str) -> tuple[str, str, State]:
        """(more JSON text, the rest, ``done`` at the end of the object, ``wrong`` where nothing of it can be)."""
        self._text += text
        made: list[str] = []
        while True:
            before, reader = self._text, self._read
            state = self._read(made)
            if state is not None:
                return "".join(made), self._text, state
            if self._text == before and self._read == reader:
                return "".join(made), "", "more"

    def _take(self, size: int) -> str:
        taken, self._text = self._text[:size], self._text[size:]
        return taken

    def _first(self) -> str:
        """The next character that is no blank, "" if there is none yet."""
        self._text = self._text.lstrip()
        return self._text[:1]

    def _begin(self, made: list[str]) -> State | None:
        first = self._first()
        if first == "{":
            self._enter(made)
            return None
        return "wrong" if first else None

    def _enter(self, made: list[str]) -> None:
        bracket = self._take(1)
        made.append(bracket)
        self._open.append("}" if bracket == "{" else "]")
        self._read = self._key if bracket == "{" else self._value

    def _leave(self, made: list[str]) -> State | None:
        made.append(self._take(1))
        self._open.pop()
        self._read = self._after
        return None if self._open else "done"

    def _key(self, made: list[str]) -> State | None:
        first = self._first()
        if first == "}":
            return self._leave(made)
        mark = QUOTE if self._text.startswith(QUOTE) else '"' if first == '"' else ""
        if mark == '"':
            match = re.match(r'"(?:[^"\\]|\\.)*"\s*:', self._text, re.DOTALL)
        else:
            match = re.match(rf"{re.escape(mark)}(.*?){re.escape(mark)}\s*:", self._text, re.DOTALL)
        if match is None or (not mark and QUOTE.startswith(self._text)):
            return "wrong" if len(self._text) > LONGEST_HEAD else None
        taken = self._take(match.end())
        key = (
            taken[:-1].rstrip()
            if mark == '"'
            else json.dumps(match[1] if mark else match[1].strip(), ensure_ascii=False)
        )
        made.append(f"{key}: ")
        self._read = self._value
        return None

    def _value(self, made: list[str]) -> State | None:
        first = self._first()
        if first and first == self._open[-1]:  # an empty array
            return self._leave(made)
        if self._text.startswith(QUOTE):
            self._take(len(QUOTE))
            made.append('"')
            self._read = self._raw
        elif first == '"':
            self._quoted = Strings()
            self._read = self._json_text
        elif first and first in "{[":
            self._enter(made)
        elif first and not QUOTE.startswith(self._text):
            self._read = self._bare
        return None

    def _raw(self, made: list[str]) -> State | None:
        """A text up to its mark."""
        before, found, rest = self._text.partition(QUOTE)
        shown = before if found else self._text[: len(self._text) - held(self._text, (QUOTE,))]
        made.append(json.dumps(shown, ensure_ascii=False)[1:-1])
        self._text = rest if found else self._text[len(shown) :]
        if found:
            made.append('"')
            self._read = self._after
        return None

    def _json_text(self, made: list[str]) -> State | None:
        """A text as JSON has it."""
        for at, character in enumerate(self._text):
            self._quoted.step(character)
            if not self._quoted.inside:
                made.append(self._take(at + 1))
                self._read = self._after
                return None
        made.append(self._take(len(self._text)))
        return None

    def _bare(self, made: list[str]) -> State | None:
        match = re.search(r"[,}\]]", self._text)
        if match is None:
            return None
        token = self._take(match.start()).strip()
        token = BARE.get(token, token)
        made.append(token if _is_json(token) else json.dumps(token, ensure_ascii=False))
        self._read = self._after
        return None

    def _after(self, made: list[str]) -> State | None:
        first = self._first()
        if first and first == self._open[-1]:
            return self._leave(made)
        if first == ",":
            self._take(1)
            made.append(", ")
            self._read = self._key if self._open[-1] == "}" else self._value
            return None
        return "wrong" if first else None


def _is_json(token: str) -> bool:
    try:
        json.loads(token)
    except ValueError:
        return False
    return token not in ("NaN", "Infinity", "-Infinity")


class CallBody:
    """``call:``, the name, the arguments."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._text = ""
        self._arguments: Arguments | None = None

    def feed(self, text: str) -> Piece:
        """As `Body.feed`."""
        piece = Piece()
        if self._arguments is None:
            self._text += text
            text = named(piece, HEAD, self._text)
            if not piece.name:
                return piece
            self._arguments = Arguments()
        piece.arguments, piece.rest, piece.state = self._arguments.feed(text)
        return piece


def structure(options: ChatOptions, wanted: StructuredOutput | None, tail: str) -> StructuredOutput | None:
    """As `ChatFormat.structure`."""
    rules = call_of_each(chosen_tools(options), lambda tool: text_part(f"call:{tool.name}"), text_part(END))
    return required_calls(
        options, wanted, thought_rule(THINK, options, tail), rules, OPENING, opening=OPENING
    )


TAGS = Tags(think=THINK, call={OPENING: CallBody}, dropped=(END,))
FORMAT = ChatFormat(
    name="gemma4",
    summary='<|tool_call>call:name{key:<|"|>value<|"|>}<tool_call|>: Gemma 4',
    marks=(OPENING, "<|channel>"),
    parser=lambda options, tail: TagParser(TAGS, options, tail),
    structure=structure,
    stop=("<turn|>", "<|tool_response>"),
    special_tokens=True,
)
