"""Channels of gpt-oss: analysis, commentary with calls, final. After OpenAI's harmony response format, whose tokens are the model's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from gristmill.runtime.chat.conversation import CallDelta, ChatOptions, Delta
from gristmill.runtime.chat.formats import ChatFormat
from gristmill.runtime.chat.formats._bodies import JsonText, held
from gristmill.runtime.chat.formats._structure import call_of_each, chosen_tools, required_calls
from gristmill.runtime.chat.formats._tags import new_call_id
from gristmill.runtime.grammar_parts import free_part, text_part, until_part
from gristmill.runtime.structured_output import StructuredOutput

ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
MESSAGE = "<|message|>"
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT_FIRST = re.compile(r"to=[\w.-]*(\s*<\|(channel|constrain|message)\|>|\s*(<(\|\w*(\|)?)?)?$)")
"""A header that begins with the recipient, or the beginning of one."""
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")


class HarmonyParser:
    """A header up to ``<|message|>``, which names channel and recipient, then a text up to its end, and so on.

    Args:
        answer_bound: as `ChatOptions.answer_bound`.
    """

    def __init__(self, answer_bound: bool = False, new_id: Callable[[], str] = new_call_id) -> None:
        self._answer_bound, self._new_id = answer_bound, new_id
        self._buffer = ""
        self._header = True
        self._kind = "final"
        self._arguments: JsonText | None = None  # of the present call, until they are whole, or no JSON
        self.reasoning_tokens = 0
        self.calls = 0
        self.open_call = False

    def push(self, text: str, ids: Sequence[int] = ()) -> Delta:
        """More of the text."""
        if self._kind == "analysis":
            self.reasoning_tokens += len(ids)
        self._buffer += text
        delta = Delta("", "", [])
        while self._advance(delta, False):
            pass
        return delta

    def finish(self) -> Delta:
        """What was held back: a header alone is nothing that a message says."""
        delta = Delta("", "", [])
        while self._advance(delta, True):
            pass
        return delta

    def _advance(self, delta: Delta, last: bool) -> bool:
        if self._header:
            head, found, rest = self._buffer.partition(MESSAGE)
            if self._kind == "final" and self._buffer and not self._starts_header(found or not last):
                self._header = False  # a model that leaves its channels out
                return True
            if not found:
                if last:
                    self._buffer = ""
                return False
            self._open(head, delta)
            self._buffer, self._header = rest, False
            return True
        if self._answer_bound and self._kind == "final":
            self._text(self._buffer, delta)
            self._buffer = ""
            return False
        at = min((i for tag in ENDS if (i := self._buffer.find(tag)) >= 0), default=-1)
        if at >= 0:
            self._text(self._buffer[:at], delta)
            tag = next(tag for tag in ENDS if self._buffer.startswith(tag, at))
            self._buffer = self._buffer[at if tag in ("<|start|>", "<|channel|>") else at + len(tag) :]
            self._header, self.open_call, self._kind = True, False, "header"
            return True
        keep = 0 if last else held(self._buffer, ENDS)
        self._text(self._buffer[: len(self._buffer) - keep], delta)
        self._buffer = self._buffer[len(self._buffer) - keep :]
        return False

    def _starts_header(self, complete: object) -> bool:
        """Whether the text may begin with a header. complete: the header's end was found, or may still come; else a recipient alone, which
        is no special token, is text."""
        text = self._buffer.lstrip()
        heads = ("<|channel|>", "<|start|>", "<|constrain|>", MESSAGE)
        if not text or any(text.startswith(head) or head.startswith(text) for head in heads):
            return True
        return bool(complete) and (RECIPIENT_FIRST.match(text) is not None or "to=".startswith(text))

    def _open(self, head: str, delta: Delta) -> None:
        channel = CHANNEL.search(head)
        recipient = RECIPIENT.search(head)
        if recipient is not None and recipient[1] not in ("assistant", "user"):
            self._kind, self._arguments = "call", JsonText()
            delta.calls = [*delta.calls, CallDelta(self.calls, "", self._new_id(), recipient[1])]
            self.calls += 1
        else:
            self._kind = channel[1] if channel is not None else "final"

    def _follow(self, arguments: str) -> None:
        """More arguments: the token that ends a message is no text, so they show whether the call is whole."""
        if self._arguments is not None:
            if self._arguments.feed(arguments)[2] != "more":
                self._arguments = None
            self.open_call = self._arguments is not None and self._arguments.begun

    def _text(self, text: str, delta: Delta) -> None:
        if not text:
            return
        if self._kind == "call":
            delta.calls = [*delta.calls, CallDelta(self.calls - 1, text)]
            self._follow(text)
        elif self._kind == "analysis":
            delta.reasoning += text
        else:
            delta.content += text


def _said(channel: str) -> str:
    """The rule of a channel's message, with what begins the next one."""
    inside = until_part("<|end|>", *(tag for tag in (*ENDS, MESSAGE) if tag != "<|end|>"))
    return f"{channel}: {text_part(f'<|channel|>{channel}<|message|>')} {inside} {text_part('<|start|>assistant')}"


ANALYSIS = _said("analysis")
FINAL = text_part("<|channel|>final<|message|>")


def structure(options: ChatOptions, wanted: StructuredOutput | None, tail: str) -> StructuredOutput | None:
    """As `ChatFormat.structure`: one call, as the message ends with it; a response format in the channel ``final``."""
    rules = call_of_each(
        chosen_tools(options),
        lambda tool: text_part(
            f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>"
        ),
        "",
    )
    thought = f"thought: analysis?\n{ANALYSIS}"
    if wanted is None and options.tool_choice == "auto":  # it may say something before a call
        thought = f"thought: (analysis | commentary)*\n{ANALYSIS}\n{_said('commentary')}"
    text = f"{FINAL} {free_part(*ENDS, MESSAGE)}"
    return required_calls(options, wanted, thought, rules, text=text, head=FINAL)


FORMAT = ChatFormat(
    name="harmony",
    summary="<|channel|>analysis<|message|>..., calls in commentary to=functions.name: gpt-oss",
    marks=("<|channel|>", "<|message|>"),
    parser=lambda options, tail: HarmonyParser(options.answer_bound),
    structure=structure,
    stop=("<|call|>", "<|return|>"),
    special_tokens=True,
)
