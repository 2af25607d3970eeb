"""The inside of a tool call, as it grows: its name, and its arguments as JSON text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from gristmill.runtime.chat.conversation import Tool

State = Literal["more", "done", "again", "wrong"]
ESCAPED = re.compile(r"\\.", re.DOTALL)
LONGEST_HEAD = 1024
"""Characters of what stands before the arguments. More is no tool call."""


@dataclass(slots=True)
class Piece:
    """What a body found in a text.

    Attributes:
        name: of the tool, once, when it is known.
        arguments: more of the JSON text.
        state: ``done``: the call is complete; ``again``: it is, and another one may follow; ``wrong``: this is no call.
        rest: what follows.
    """

    name: str = ""
    arguments: str = ""
    state: State = "more"
    rest: str = ""


class Body(Protocol):
    """A parser of one call."""

    def feed(self, text: str) -> Piece:
        """More text."""
        ...


class JsonText:
    """Finds the end of a JSON object or array in a text that grows."""

    def __init__(self) -> None:
        self._depth, self._inside, self._escaped, self.begun = 0, False, False, False

    def feed(self, text: str) -> tuple[str, str, State]:
        """(the part that belongs to it, the rest, ``done`` at its end, ``wrong`` if none begins here)."""
        start = 0
        if not self.begun:
            start = len(text) - len(text.lstrip())
            if start == len(text):
                return "", "", "more"
            if text[start] not in "{[":
                return "", text, "wrong"
            self.begun = True
        for at in range(start, len(text)):
            character = text[at]
            if self._inside:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._inside = False
            elif character == '"':
                self._inside = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return text[start : at + 1], text[at + 1 :], "done"
        return text[start:], "", "more"


def _named(piece: Piece, head: re.Pattern[str], text: str) -> str:
    """Set the name, or what a text without one is; what follows the head."""
    match = head.match(text)
    if match is None:
        piece.state = "wrong" if len(text) > LONGEST_HEAD else "more"
        return ""
    piece.name = match["name"].strip()
    if not piece.name:
        piece.state = "wrong"
    return text[match.end() :]


class HeadBody:
    """A head that has the name, then the arguments as a JSON object.

    Args:
        head: matches all of the head, with the group ``name``.
    """

    def __init__(self, head: re.Pattern[str]) -> None:
        self._head = head
        self._text = ""
        self._json: JsonText | None = None

    def feed(self, text: str) -> Piece:
        """As `Body.feed`."""
        piece = Piece()
        if self._json is None:
            self._text += text
            text = _named(piece, self._head, self._text)
            if not piece.name:
                return piece
            self._json = JsonText()
        piece.arguments, piece.rest, piece.state = self._json.feed(text)
        if piece.state == "wrong":  # a call without arguments
            piece.arguments, piece.rest, piece.state = "{}", text, "done"
        return piece


class JsonBody:
    """A JSON object with the name and the arguments as entries.

    Args:
        keys: names of the entry that has the arguments.
    """

    def __init__(self, keys: tuple[str, ...] = ("arguments", "parameters")) -> None:
        self._keys = keys
        self._depth, self._inside, self._escaped = 0, False, False
        self._key: str | None = None  # of the present entry
        self._reading: Literal["key", "value", ""] = ""
        self._token: list[str] = []  # of a key, or of a value that is no arguments
        self._held: list[str] = []  # arguments that came before the name
        self._quoted = False  # the arguments are JSON text in a string
        self._name = ""
        self._has_arguments = False

    def feed(self, text: str) -> Piece:
        """As `Body.feed`."""
        piece = Piece()
        made: list[str] = []
        for at, character in enumerate(text):
            if self._depth == 0:
                if character.isspace():
                    continue
                if character != "{":
                    piece.state, piece.rest = "wrong", text[at:]
                    return piece
                self._depth, self._reading = 1, "key"
                continue
            ends = self._step(character, made, piece)
            if ends:
                piece.state = ends
                piece.rest = text[at + 1 :]
                break
        if self._name and made:
            piece.arguments = "".join(made)
        elif made:
            self._held += made
        if piece.name and self._held:
            piece.arguments = "".join(self._held) + piece.arguments
            self._held = []
        if piece.state == "done":
            if not self._name:
                piece.state = "wrong"
            elif not self._has_arguments:
                piece.arguments += "{}"
        return piece

    def _step(self, character: str, made: list[str], piece: Piece) -> State | None:
        """One character inside the object."""
        if self._inside:
            self._put(character, made)
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._inside = False
            return None
        if self._depth > 1:
            self._put(character, made)
            if character == '"':
                self._inside = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
            return None
        if character.isspace():
            return None
        if character in ",}":
            if not self._close(made, piece):
                return "wrong"
            self._reading, self._key = "key", None
            if character == "}":
                self._depth = 0
                return "done"
            return None
        if character == ":" and self._reading == "key" and self._token:
            key = _loaded(self._token)
            if not isinstance(key, str):
                return "wrong"
            self._key, self._reading, self._token = key, "value", []
            return None
        if self._reading == "key" and character != '"':
            return "wrong"
        self._put(character, made)
        if character == '"':
            self._inside = True
        elif character in "{[":
            self._depth += 1
        return None

    def _put(self, character: str, made: list[str]) -> None:
        if self._reading == "value" and self._key in self._keys and not self._quoted:
            if not self._has_arguments:
                self._has_arguments = True
                if character != "{":  # a string, or null: decoded at its end
                    self._quoted = True
                    self._token.append(character)
                    return
            made.append(character)
        else:
            self._token.append(character)

    def _close(self, made: list[str], piece: Piece) -> bool:
        """The end of an entry; whether it is a sound one."""
        if self._reading == "key":
            return self._key is None and not self._token  # an empty object, a comma at the end
        if self._key == "name":
            name = _loaded(self._token)
            if not isinstance(name, str) or not name:
                return False
            self._name = piece.name = name
        elif self._key in self._keys and self._quoted:
            value = _loaded(self._token)
            if value is not None and not isinstance(value, str):
                return False
            made.append(value or "{}")
        self._token = []
        self._quoted = False
        return True


def _loaded(token: list[str]) -> Any:
    try:
        return json.loads("".join(token))
    except ValueError:
        return False


class SeriesBody:
    """Several JSON objects with name and arguments, one after another.

    Args:
        opening, separators, closing: characters before the first one, between two, and after the last. Without `opening` there is at
            least one object; without `closing` the last one is followed by anything else.
    """

    def __init__(self, separators: str, opening: str = "", closing: str = "") -> None:
        self._separators, self._opening, self._closing = separators, opening, closing
        self._one: JsonBody | None = None
        self._begun = not opening
        self._count = 0

    def feed(self, text: str) -> Piece:
        """As `Body.feed`."""
        if self._one is None:
            text = text.lstrip() if self._count == 0 else text.lstrip(self._separators + " \t\r\n")
            if not text:
                return Piece()
            if not self._begun and text[0] == self._opening:
                self._begun = True
                return self.feed(text[1:])
            if self._closing and text[0] == self._closing and self._begun:
                return Piece(state="done", rest=text[1:])
            if text[0] != "{":
                return Piece(state="done" if self._count else "wrong", rest=text)
            self._one = JsonBody()
        piece = self._one.feed(text)
        if piece.state == "done":
            self._one, self._count = None, self._count + 1
            piece.state = "again"
        return piece


@dataclass(frozen=True, slots=True)
class Marks:
    """How keys and values stand in a call.

    Attributes:
        head: matches up to the first key or the end, with the group ``name``.
        key: matches what is before a value, with the group ``key``.
        value_end: the text after a value.
        end: the text after the last value; it is left for the caller if `keep_end`.
    """

    head: re.Pattern[str]
    key: re.Pattern[str]
    value_end: str
    end: str
    keep_end: bool = False


@dataclass(slots=True)
class PairBody:
    """Keys and values in marks, as JSON: a value is a text where the tool's schema says so, else JSON if it is sound, else a text."""

    marks: Marks
    tools: Mapping[str, Tool]
    _text: str = ""
    _tool: Tool | None = None
    _named: bool = False
    _key: str | None = None
    _count: int = 0

    def feed(self, text: str) -> Piece:
        """As `Body.feed`."""
        self._text += text
        piece = Piece()
        if not self._named:
            rest = _named(piece, self.marks.head, self._text)
            if not piece.name:
                return piece
            self._named, self._tool = True, self.tools.get(piece.name)
            piece.arguments, self._text = "{", rest
        while piece.state == "more" and self._advance(piece):
            pass
        return piece

    def _advance(self, piece: Piece) -> bool:
        """One key, value or end; False = more text is needed."""
        marks = self.marks
        if self._key is None:
            text = self._text.lstrip()
            if text.startswith(marks.end):
                piece.arguments += "}"
                piece.state = "done"
                piece.rest = text if marks.keep_end else text[len(marks.end) :]
                return False
            match = marks.key.match(text)
            if match is None:
                if not marks.end.startswith(text) and len(text) > LONGEST_HEAD:
                    piece.state, piece.rest = "done", text
                    piece.arguments += "}"
                return False
            self._key, self._text = match["key"].strip(), text[match.end() :]
            return True
        at = self._value_end()
        if at < 0:
            return False
        value, rest = self._text[:at], self._text[at + len(marks.value_end) :]
        separator = ", " if self._count else ""
        piece.arguments += f"{separator}{json.dumps(self._key, ensure_ascii=False)}: {self._value(value)}"
        self._count += 1
        self._key, self._text = None, rest
        return True

    def _value_end(self) -> int:
        """Where the present value ends, -1 = not yet. In a string of JSON its mark ends nothing."""
        at = self._text.find(self.marks.value_end)
        if self._is_text() or self._text.lstrip()[:1] not in ("{", "[", '"'):
            return at
        while at >= 0 and ESCAPED.sub("", self._text[:at]).count('"') % 2:
            at = self._text.find(self.marks.value_end, at + 1)
        return at

    def _is_text(self) -> bool:
        """Whether the tool's schema says that the present value is a text."""
        schema = self._tool.parameters.get("properties", {}) if self._tool is not None else {}
        declared = schema.get(self._key, {}) if isinstance(schema, Mapping) else {}
        return isinstance(declared, Mapping) and declared.get("type") == "string"

    def _value(self, text: str) -> str:
        text = text.removeprefix("\n").removesuffix("\n")
        if not self._is_text():
            try:
                return json.dumps(json.loads(text), ensure_ascii=False)
            except ValueError:
                lowered = text.strip().lower()
                if lowered in ("true", "false", "none", "null"):
                    return "null" if lowered in ("none", "null") else lowered
        return json.dumps(text, ensure_ascii=False)
