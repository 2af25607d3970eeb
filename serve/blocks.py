"""The parts of one completion as blocks that come one after another: thoughts, text, calls of tools, as the model writes them."""

from __future__ import annotations

from typing import Literal, NamedTuple

from gristmill.runtime.chat.conversation import CallDelta
from gristmill.serve.generation import Part

Kind = Literal["thoughts", "text", "call"]


class Step(NamedTuple):
    """A block begins, grows by a text, or ends. Of a call the text is JSON; `id` and `name` are known where it begins."""

    action: Literal["begin", "add", "end"]
    kind: Kind
    text: str = ""
    id: str = ""
    name: str = ""


class Blocks:
    """Cuts the parts of one completion into blocks. `thoughts` False leaves those out.

    A part of several tokens does not say in which order its kinds came: thoughts, text and calls is what models write, and the rest of a call
    that has begun comes before them.
    """

    def __init__(self, thoughts: bool = True) -> None:
        self._thoughts = thoughts
        self._open: Kind | None = None
        self._call = -1  # the last one that has begun
        self._bare = False  # it has no arguments yet
        self._blank = ""  # space at the beginning of a text that may turn out to have nothing else

    def of(self, part: Part) -> list[Step]:
        """What a part does; the last one ends the last block."""
        steps: list[Step] = []
        delta = part.delta
        rest = [call for call in delta.calls if self._open == "call" and call.index == self._call]
        for call in rest:
            self._add_call(steps, call)
        if delta.reasoning and self._thoughts:
            self._add(steps, "thoughts", delta.reasoning)
        if delta.content:
            self._add_text(steps, delta.content)
        for call in delta.calls[len(rest) :]:
            self._add_call(steps, call)
        if part.finish is not None:
            if self._blank and self._call < 0:
                self._add(steps, "text", self._blank)
            self._end(steps, part.finish != "tool_calls")
        return steps

    def _add(self, steps: list[Step], kind: Kind, text: str) -> None:
        if self._open != kind:
            self._begin(steps, Step("begin", kind))
        steps.append(Step("add", kind, text))

    def _add_text(self, steps: list[Step], text: str) -> None:
        if self._open != "text":
            text = self._blank + text
            self._blank = text if text.isspace() else ""
            if self._blank:
                return
        self._add(steps, "text", text)

    def _add_call(self, steps: list[Step], call: CallDelta) -> None:
        self._blank = ""  # space between calls is no text
        if call.index > self._call:
            self._call = call.index
            self._begin(steps, Step("begin", "call", "", call.id, call.name))
            self._bare = True
        if call.arguments:
            if self._open != "call" or call.index != self._call:
                raise RuntimeError(f"arguments of call {call.index} came after its end")
            self._bare = False
            steps.append(Step("add", "call", call.arguments))

    def _begin(self, steps: list[Step], step: Step) -> None:
        self._end(steps)
        self._open = step.kind
        steps.append(step)

    def _end(self, steps: list[Step], cut: bool = False) -> None:
        if self._open is not None:
            if self._open == "call" and self._bare and not cut:
                steps.append(Step("add", "call", "{}"))  # clients read JSON
            steps.append(Step("end", self._open))
            self._open = None
