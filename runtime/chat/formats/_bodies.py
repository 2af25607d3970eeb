"""The inside of a tool call, as it grows: its name, and its arguments as JSON text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from gristmill.runtime.chat.conversation import Tool

State = Literal["more", "done", "again", "wrong"]
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


class Strings:
    """Follows the strings of a JSON text, character by character.

    Attributes:
        inside: the last character was inside one, or its opening quote.
    """

    def __init__(self) -> None:
        self.inside = self._escaped = False

    def step(self, character: str) -> bool:
        """The next character; whether it belongs to a string, quotes included."""
        if not self.inside:
            self.inside = character == '"'
            return self.inside
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self.inside = False
        return True


class JsonText:
    """Finds the end of a JSON object or array in a text that grows."""

    def __init__(self) -> None:
        self._depth, self._strings, self.begun = 0, Strings(), False

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
            if self._strings.step(character):
                continue
            if character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return text[start : at + 1], text[at + 1 :], "done"
        return text[start:], "", "more"


def named(piece: Piece, head: re.Pattern[str], text: str) -> str:
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
            text = named(piece, self._head, self._text)
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
        self._depth, self._strings = 0, Strings()
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
        if self._strings.inside or self._depth > 1:
            self._put(character, made)
            if self._strings.step(character):
                return None
            if character in "{[":
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
        if not self._strings.step(character) and character in "{[":
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


class Value:
    """A value up to its end mark, in a text that grows; each character is looked at once.

    In a string of JSON the mark ends nothing.

    Args:
        mark: the text after the value.
        is_text: it is a text; else it is JSON if it begins like an object, an array or a string.
    """

    def __init__(self, mark: str, is_text: bool) -> None:
        self._mark, self.is_text = mark, is_text
        self._places = re.compile(rf'\\.|"|{re.escape(mark)}', re.DOTALL)
        self._pieces: list[str] = []
        self._rest = ""  # what may be the beginning of a mark or an escape
        self._in_json: bool | None = False if is_text else None  # None = nothing but blanks so far
        self._quoted = False

    @property
    def text(self) -> str:
        """The value so far."""
        return "".join(self._pieces)

    def feed(self, text: str) -> str | None:
        """More text. What follows the mark; None = it has not come."""
        return self._scan(self._rest + text)

    def _scan(self, text: str) -> str | None:
        if self._in_json is None and (begun := text.lstrip()):
            self._in_json = begun[0] in '{["'
        at = 0
        if self._in_json:
            for found in self._places.finditer(text):
                at = found.end()
                if found[0] == '"':
                    self._quoted = not self._quoted
                elif found[0] == self._mark and not self._quoted:
                    self._pieces.append(text[: found.start()])
                    return text[at:]
        elif (start := text.find(self._mark)) >= 0:
            self._pieces.append(text[:start])
            return text[start + len(self._mark) :]
        keep = held(text[at:], (self._mark, "\\.")) if self._in_json else held(text, (self._mark,))
        self._pieces.append(text[: len(text) - keep])
        self._rest = text[len(text) - keep :]
        return None


@dataclass(slots=True)
class PairBody:
    """Keys and values in marks, as JSON: a value is a text where the tool's schema says so, else JSON if it is sound, else a text."""

    marks: Marks
    tools: Mapping[str, Tool]
    _text: str = ""
    _tool: Tool | None = None
    _named: bool = False
    _key: str = ""
    _value: Value | None = None
    _count: int = 0

    def feed(self, text: str) -> Piece:
        """As `Body.feed`."""
        self._text += text
        piece = Piece()
        if not self._named:
            rest = named(piece, self.marks.head, self._text)
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
        if self._value is None:
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
            self._value = Value(marks.value_end, self._is_text())
            return True
        rest = self._value.feed(self._text)
        self._text = rest or ""
        if rest is None:
            return False
        separator = ", " if self._count else ""
        piece.arguments += f"{separator}{json.dumps(self._key, ensure_ascii=False)}: {_as_json(self._value)}"
        self._count += 1
        self._value = None
        return True

    def _is_text(self) -> bool:
        """Whether the tool's schema says that the present value is a text."""
        schema = self._tool.parameters.get("properties", {}) if self._tool is not None else {}
        declared = schema.get(self._key, {}) if isinstance(schema, Mapping) else {}
        return isinstance(declared, Mapping) and declared.get("type") == "string"


def _as_json(value: Value) -> str:
    text = value.text.removeprefix("\n").removesuffix("\n")
    if not value.is_text:
        try:
            return json.dumps(json.loads(text), ensure_ascii=False)
        except ValueError:
            lowered = text.strip().lower()
            if lowered in ("true", "false", "none", "null"):
                return "null" if lowered in ("none", "null") else lowered
    return json.dumps(text, ensure_ascii=False)


def held(text: str, tags: Sequence[str]) -> int:
    """Length of the longest end of a text that may be the beginning of a tag."""
    longest = max((len(tag) for tag in tags), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        end = text[len(text) - length :]
        if any(len(tag) > length and tag.startswith(end) for tag in tags):
            return length
    return 0
