"""The parser of formats that mark thoughts and tool calls by tags in the text.

It keeps back what may be the beginning of a tag, and blanks that may turn out to stand before one; so what it returns does not depend on how the
text is cut.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gristmill.runtime.chat.conversation import CallDelta, ChatOptions, Delta, Tool
from gristmill.runtime.chat.formats._bodies import Body, held

THINK = ("<think>", "</think>")


def new_call_id() -> str:
    """An id for a tool call."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True)
class Tags:
    """The tags of a format.

    Attributes:
        think: begin and end of a thought.
        call: what begins a call -> what makes the parser of its inside, from the tools by name.
        dropped: texts around calls that mean nothing.
        first: a character with which a call begins where only blanks are before it, without a tag.
    """

    think: tuple[str, str] | None = THINK
    call: Mapping[str, Callable[[Mapping[str, Tool]], Body]] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    first: tuple[str, Callable[[Mapping[str, Tool]], Body]] | None = None


class _Out:
    """What one push returns, as it is found."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[CallDelta] = []

    def delta(self) -> Delta:
        return Delta("".join(self.content), "".join(self.reasoning), self.calls)


class TagParser:
    """Parses one completion.

    Args:
        tail: the end of the prompt: a thought that it has begun is open.
        new_id: makes ids of calls.
    """

    def __init__(
        self, tags: Tags, options: ChatOptions, tail: str, new_id: Callable[[], str] = new_call_id
    ) -> None:
        self._tags, self._new_id = tags, new_id
        self._tools = {tool.name: tool for tool in options.tools}
        parses = bool(options.tools) and options.tool_choice != "none"
        self._calls = tags.call if parses else {}
        self._dropped = tags.dropped if parses else ()
        self._first = tags.first if parses else None
        think = tags.think
        self._thinking = think is not None and tail.rstrip().endswith(think[0])
        self._buffer = ""
        self._fresh = True  # nothing but blanks so far
        self._strip = False  # blanks here follow a tag
        self._opened = True  # the thought has no text yet
        self._answer_bound = options.answer_bound
        self._sealed = False  # an answer has begun in which no tag means anything
        self._body: Body | None = None
        self._tag = self._raw = ""  # what began the present call, and its text until its name is known
        self._named = False
        self.reasoning_tokens = 0
        self.calls = 0
        self.open_call = False

    def push(self, text: str, ids: Sequence[int] = ()) -> Delta:
        """More of the text."""
        if self._thinking:
            self.reasoning_tokens += len(ids)
        if not self._calls and self._first is None and self._tags.think is None:
            return Delta(text)
        self._buffer += text
        out = _Out()
        while self._advance(out, False):
            pass
        return out.delta()

    def finish(self) -> Delta:
        """What was held back, but for the beginning of a further call, which was cut."""
        out = _Out()
        if self._within_tag():
            self._buffer = ""
        while self._advance(out, True):
            pass
        if self._body is not None and not self._named:
            if not self.calls:
                out.content.append(self._tag + self._raw)
            self._body = None
        if self._buffer:
            (out.reasoning if self._thinking else out.content).append(self._buffer)
            self._buffer = ""
        return out.delta()

    def _within_tag(self) -> bool:
        """Whether nothing but the beginning of a tag is left behind a call."""
        behind = self.calls and self._strip and self._body is None and not self._thinking
        rest = self._buffer.strip()
        return bool(behind) and any(tag.startswith(rest) for tag in (*self._calls, *self._dropped))

    def _advance(self, out: _Out, last: bool) -> bool:
        """Take the next part of the buffer; False = more text is needed."""
        if self._body is not None:
            return self._in_call(self._body, out)
        if self._thinking:
            return self._in_thought(out)
        return self._in_content(out, last)

    def _in_thought(self, out: _Out) -> bool:
        think = self._tags.think or THINK
        if self._opened:  # blanks, and a tag that the prompt has already
            self._buffer = self._buffer.lstrip()
            if self._buffer.startswith(think[0]):
                self._buffer = self._buffer[len(think[0]) :]
                return True
            if not self._buffer or think[0].startswith(self._buffer):
                return False
        before, found, rest = self._buffer.partition(think[1])
        if found:
            out.reasoning.append(before.rstrip())
            self._thinking, self._strip, self._fresh, self._buffer = False, True, True, rest
            return True
        shown = self._buffer[: len(self._buffer) - held(self._buffer, (think[1],))]
        shown = shown.rstrip()  # blanks before the end belong to nobody
        if shown:
            self._opened = False
            out.reasoning.append(shown)
            self._buffer = self._buffer[len(shown) :]
        return False

    def _in_content(self, out: _Out, last: bool) -> bool:
        if self._sealed:
            if self._buffer:
                out.content.append(self._buffer)
                self._buffer = ""
            return False
        if self._first is not None and self._fresh:
            stripped = self._buffer.lstrip()
            if stripped.startswith(self._first[0]):
                self._begin(self._first[1], self._buffer[: len(self._buffer) - len(stripped)])
                self._buffer = stripped
                return True
        think = self._tags.think
        tags = [*self._calls, *self._dropped, *([think[0]] if think else [])]
        if self._answer_bound:
            stripped = self._buffer.lstrip()
            if stripped and not any(
                stripped.startswith(tag) or (not last and tag.startswith(stripped)) for tag in tags
            ):
                self._sealed = True
                self._buffer = stripped if self._strip else self._buffer
                return True
        found = [(at, -len(tag), tag) for tag in tags if (at := self._buffer.find(tag)) >= 0]
        if found:
            at, _, tag = min(found)
            before, self._buffer = self._buffer[:at], self._buffer[at + len(tag) :]
            if text := (before.lstrip() if self._strip else before).rstrip():
                out.content.append(text)
                self._fresh = self._strip = False
            self._strip = self._strip or tag not in self._dropped
            if think is not None and tag == think[0]:
                self._thinking = self._opened = True
            elif tag in self._calls:
                self._begin(self._calls[tag], tag)
            return True
        shown = self._buffer[: len(self._buffer) - (0 if last else held(self._buffer, tags))]
        if self._strip:
            stripped = shown.lstrip()
            self._buffer = self._buffer[len(shown) - len(stripped) :]
            shown = stripped
        if not last:  # blanks may stand before a tag
            shown = shown.rstrip()
        if shown:
            self._strip = False
            self._fresh = self._fresh and not shown.strip()
            out.content.append(shown)
            self._buffer = self._buffer[len(shown) :]
        return False

    def _begin(self, make: Callable[[Mapping[str, Tool]], Body], tag: str) -> None:
        self._body, self._tag, self._raw, self._named = make(self._tools), tag, "", False

    def _in_call(self, body: Body, out: _Out) -> bool:
        text, self._buffer = self._buffer, ""
        if not text:
            return False
        if not self._named:
            self._raw += text
        piece = body.feed(text)
        if piece.name:
            out.calls.append(CallDelta(self.calls, piece.arguments, self._new_id(), piece.name))
            self.calls += 1
            self._named = self.open_call = True
        elif piece.arguments:
            out.calls.append(CallDelta(self.calls - 1, piece.arguments))
        if piece.state == "more":
            return False
        self._fresh, self._strip = False, True
        if piece.state == "wrong" and not self._named:  # it was text after all, in which tags may be
            taken = self._tag or self._raw[:1]
            out.content.append(taken)
            self._buffer = self._raw if self._tag else self._raw[1:]
            self._body, self._strip = None, False
            self._sealed = self._answer_bound
            return True
        self._buffer, self.open_call = piece.rest, False
        if piece.state == "again":
            self._tag, self._raw, self._named = "", "", False
        else:
            self._body = None
        return True
