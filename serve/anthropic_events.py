"""The parts of one completion as events of Anthropic's messages API, and a message as what its events add up to."""

from __future__ import annotations

import base64
import hashlib
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from gristmill.serve.anthropic_messages import CALL_PREFIX
from gristmill.serve.blocks import Blocks, Step
from gristmill.serve.generation import Part

STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

Event = dict[str, Any]


class MessageEvents:
    """The events of one message.

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
        self._blocks = Blocks(thoughts != "dropped")
        self._index = -1  # of the last block
        self._digest = hashlib.sha256()  # of the last thoughts

    def start(self) -> list[Event]:
        """Before the first part."""
        usage = self._usage() | {"output_tokens": 0}
        return [{"type": "message_start", "message": self._head | {"content": [], "usage": usage}}]

    def of(self, part: Part) -> list[Event]:
        """What a part adds; the last one ends the message."""
        events: list[Event] = []
        for step in self._blocks.of(part):
            if step.action == "begin":
                self._index += 1
                block = self._block(step)
                events.append({"type": "content_block_start", "index": self._index, "content_block": block})
                continue
            if (delta := self._delta(step)) is not None:
                events.append({"type": "content_block_delta", "index": self._index, "delta": delta})
            if step.action == "end":
                events.append({"type": "content_block_stop", "index": self._index})
        if part.finish is not None:
            self._end(events, part.finish, part.chunk.stop_reason)
        return events

    def _block(self, step: Step) -> Event:
        if step.kind == "text":
            return {"type": "text", "text": "", "citations": None}
        if step.kind == "thoughts":
            self._digest = hashlib.sha256()
            return {"type": "thinking", "thinking": "", "signature": ""}
        name = step.id.removeprefix(CALL_PREFIX) or uuid.uuid4().hex[:24]
        return {"type": "tool_use", "id": CALL_PREFIX + name, "name": step.name, "input": {}}

    def _delta(self, step: Step) -> Event | None:
        if step.kind == "thoughts":
            if step.action == "end":
                # Clients give thoughts back with their signature, and some want one. Ours tells nothing but the text.
                signature = base64.b64encode(self._digest.digest()).decode()
                return {"type": "signature_delta", "signature": signature}
            self._digest.update(step.text.encode("utf-8", "surrogatepass"))
            return {"type": "thinking_delta", "thinking": step.text} if self._thoughts == "shown" else None
        if step.action == "end":
            return None
        if step.kind == "text":
            return {"type": "text_delta", "text": step.text}
        return {"type": "input_json_delta", "partial_json": step.text}

    def _end(self, events: list[Event], finish: str, stop: int | str | None) -> None:
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
