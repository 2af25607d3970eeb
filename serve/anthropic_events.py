"""The parts of one completion as events of Anthropic's messages API, and a message as what its events add up to."""

from __future__ import annotations

import base64
import hashlib
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from gristmill.runtime.chat.conversation import CallDelta
from gristmill.serve.anthropic_messages import CALL_PREFIX
from gristmill.serve.generation import Part

STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

Event = dict[str, Any]


class MessageEvents:
    """The events of one message. Blocks come one after another: thinking, text, calls of tools, as the model writes them.

    Args:
        head: the message without content and usage.
        thoughts: ``shown``; ``omitted``: an empty thinking block stands for them; ``dropped``: no block.
        stops: the stop sequences of the request.
        full: what is said of a completion that ended by its length.
        usage: the tokens so far.
    """

    def __init__(
        self,
        head: dict[str, Any],
        *,
        thoughts: str,
        stops: Iterable[str],
        full: str,
        usage: Callable[[], dict[str, Any]],
    ) -> None:
        self._head, self._thoughts, self._stops, self._usage = head, thoughts, frozenset(stops), usage
        self._stop_reasons = STOPS | {"length": full}
        self._index = -1  # of the block that is open, or was last
        self._open = ""  # its kind
        self._call = -1  # the tool call in it
        self._digest = hashlib.sha256()
        self._blank = ""  # space at the beginning of a text that may turn out to have nothing else

    def start(self) -> list[Event]:
        """Before the first part."""
        usage = self._usage() | {"output_tokens": 0}
        return [{"type": "message_start", "message": self._head | {"content": [], "usage": usage}}]

    def of(self, part: Part) -> list[Event]:
        """What a part adds; the last one ends the message."""
        events: list[Event] = []
        delta = part.delta
        # The rest of a call was written before whatever else came with it.
        rest = [call for call in delta.calls if self._open == "tool_use" and call.index == self._call]
        new = delta.calls[len(rest) :]
        for call in rest:
            self._tool(events, call)
        if delta.reasoning and self._thoughts != "dropped":
            self._think(events, delta.reasoning)
        if delta.content:
            self._text(events, delta.content)
        for call in new:
            self._tool(events, call)
        if part.finish is not None:
            self._end(events, part.finish, part.chunk.stop_reason)
        return events

    def _think(self, events: list[Event], text: str) -> None:
        if self._open != "thinking":
            self._begin(events, "thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._digest = hashlib.sha256()
        self._digest.update(text.encode("utf-8", "surrogatepass"))
        if self._thoughts == "shown":
            self._delta(events, {"type": "thinking_delta", "thinking": text})

    def _text(self, events: list[Event], text: str) -> None:
        if self._open != "text":
            text = self._blank + text
            self._blank = ""
            if text.isspace():
                self._blank = text
                return
            self._begin(events, "text", {"type": "text", "text": "", "citations": None})
        self._delta(events, {"type": "text_delta", "text": text})

    def _tool(self, events: list[Event], call: CallDelta) -> None:
        self._blank = ""  # between calls there is no text
        if call.index > self._call:
            self._call = call.index
            name = call.id.removeprefix(CALL_PREFIX) or uuid.uuid4().hex[:24]
            block = {"type": "tool_use", "id": CALL_PREFIX + name, "name": call.name, "input": {}}
            self._begin(events, "tool_use", block)
        if call.arguments:
            if self._open != "tool_use" or call.index != self._call:
                raise RuntimeError(f"arguments of call {call.index} came after its end")
            self._delta(events, {"type": "input_json_delta", "partial_json": call.arguments})

    def _begin(self, events: list[Event], kind: str, block: dict[str, Any]) -> None:
        self._close(events)
        self._index += 1
        self._open = kind
        events.append({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, events: list[Event], delta: dict[str, Any]) -> None:
        events.append({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self, events: list[Event]) -> None:
        if not self._open:
            return
        if self._open == "thinking":
            # Clients give thoughts back with their signature, and some want one. Ours tells nothing but the text.
            signature = base64.b64encode(self._digest.digest()).decode()
            self._delta(events, {"type": "signature_delta", "signature": signature})
        events.append({"type": "content_block_stop", "index": self._index})
        self._open = ""

    def _end(self, events: list[Event], finish: str, stop: int | str | None) -> None:
        if self._blank and self._call < 0:
            self._begin(events, "text", {"type": "text", "text": "", "citations": None})
            self._delta(events, {"type": "text_delta", "text": self._blank})
        self._close(events)
        reason, sequence = self._stop_reasons[finish], None
        if finish == "stop" and isinstance(stop, str) and stop in self._stops:
            reason, sequence = "stop_sequence", stop
        delta = {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}
        events.append({"type": "message_delta", "delta": delta, "usage": self._usage()})
        events.append({"type": "message_stop"})


class MessageFold:
    """The message that events add up to."""

    def __init__(self) -> None:
        self.message: dict[str, Any] = {}
        self._texts: list[list[str]] = []  # of each block

    def add(self, events: Iterable[Event]) -> None:
        """The next events."""
        for event in events:
            kind = event["type"]
            if kind == "message_start":
                self.message = dict(event["message"])
            elif kind == "content_block_start":
                self.message["content"].append(dict(event["content_block"]))
                self._texts.append([])
            elif kind == "content_block_delta":
                self._delta(event["index"], event["delta"])
            elif kind == "content_block_stop":
                self._stop(event["index"])
            elif kind == "message_delta":
                self.message |= event["delta"]
                self.message["usage"] = event["usage"]

    def _delta(self, index: int, delta: dict[str, Any]) -> None:
        kind = delta["type"]
        if kind == "signature_delta":
            self.message["content"][index]["signature"] = delta["signature"]
        else:
            field = {
                "text_delta": "text",
                "thinking_delta": "thinking",
                "input_json_delta": "partial_json",
            }[kind]
            self._texts[index].append(delta[field])

    def _stop(self, index: int) -> None:
        block, text = self.message["content"][index], "".join(self._texts[index])
        if block["type"] == "tool_use":
            block["input"] = tool_input(text)
        else:
            block[block["type"]] = text


def tool_input(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object. This API has no place for others: what is no object is the text under INVALID_JSON."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}
