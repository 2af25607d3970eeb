"""The items of OpenAI's responses API: what a conversation consists of there."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from gristmill.runtime.chat.conversation import Message, ToolCall
from gristmill.serve.errors import ApiError

Item = dict[str, Any]
MAX_ITEMS = 16_384


class GivenPart(msgspec.Struct):
    """A part of a content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class GivenItem(msgspec.Struct):
    """An item of the input, with the fields of every kind that is known."""

    type: str | None = None
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[GivenPart] | None = None
    summary: list[GivenPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[GivenPart] | None = None

    @property
    def kind(self) -> str | None:
        """The type, which messages and references may leave out."""
        return self.type or ("message" if self.role else "item_reference" if self.id else None)


def new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return f"{prefix}_{uuid.uuid4().hex}"


def input_items(given: str | Sequence[GivenItem], known: Mapping[str, Item]) -> list[Item]:
    """The input as complete items, each with an id. ApiError names the one that is wrong.

    Args:
        known: the items that references may be to, by id.
    """
    if isinstance(given, str):
        return [_message("user", "msg", None, [{"type": "input_text", "text": given}])]
    if not given:
        raise ApiError(400, "input must be a text or at least one item", param="input")
    if len(given) > MAX_ITEMS:
        raise ApiError(400, f"input: {len(given)} items are more than {MAX_ITEMS}", param="input")
    return [_item(item, f"input[{index}]", known) for index, item in enumerate(given)]


def _item(given: GivenItem, place: str, known: Mapping[str, Item]) -> Item:
    kind = given.kind
    if kind == "message":
        if given.role is None or given.content is None:
            raise ApiError(400, f"{place}: a message needs role and content", param=place)
        side = "output_text" if given.role == "assistant" else "input_text"
        texts = _texts(given.content, f"{place}.content")
        parts: list[Item] = [{"type": side, "text": text} for text in texts]
        if side == "output_text":
            parts = [part | {"annotations": []} for part in parts]
        return _message(given.role, "msg", given.id, parts)
    if kind == "function_call":
        if not given.call_id or not given.name or given.arguments is None:
            raise ApiError(400, f"{place}: a function_call needs call_id, name and arguments", param=place)
        return {
            "type": kind,
            "id": given.id or new_id("fc"),
            "call_id": given.call_id,
            "name": given.name,
            "arguments": given.arguments,
            "status": "completed",
        }
    if kind == "function_call_output":
        if not given.call_id or given.output is None:
            raise ApiError(400, f"{place}: a function_call_output needs call_id and output", param=place)
        texts = _texts(given.output, f"{place}.output")
        return {
            "type": kind,
            "id": given.id or new_id("fco"),
            "call_id": given.call_id,
            "output": "".join(texts),
            "status": "completed",
        }
    if kind == "reasoning":
        thoughts = [] if given.content is None else _texts(given.content, f"{place}.content")
        summary = _texts(given.summary or [], f"{place}.summary")
        return {
            "type": kind,
            "id": given.id or new_id("rs"),
            "summary": [{"type": "summary_text", "text": text} for text in summary],
            "content": [{"type": "reasoning_text", "text": text} for text in thoughts],
        }
    if kind == "item_reference":
        found = known.get(given.id or "")
        if found is None:
            raise ApiError(400, f"{place}: this server keeps no item {given.id!r}", param=place)
        return found
    raise ApiError(400, f"{place}: an item of type {kind!r} is not supported by this server", param=place)


def _message(role: str, prefix: str, id: str | None, parts: list[Item]) -> Item:
    return {
        "type": "message",
        "id": id or new_id(prefix),
        "role": role,
        "status": "completed",
        "content": parts,
    }


TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def _texts(content: str | Sequence[GivenPart], place: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    texts = []
    for index, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in (*TEXTS, "refusal"):
            raise ApiError(
                400,
                f"{place}[{index}]: this model takes text only, got a part of type {part.type!r}",
                param=place,
            )
        if text is None:
            raise ApiError(400, f"{place}[{index}] of type {part.type!r} has no text", param=place)
        texts.append(text)
    return texts


def conversation(items: Sequence[Item], instructions: str | None) -> list[Message]:
    """The messages that items stand for: thoughts, text and calls in a row are one message of the assistant."""
    messages: list[Message] = [] if instructions is None else [Message("system", instructions)]
    names = {one["call_id"]: one["name"] for one in items if one["type"] == "function_call"}
    turn = _Turn()
    for item in items:
        kind = item["type"]
        text = "".join(part["text"] for part in item.get("content") or ())
        if kind == "reasoning":
            if turn.text or turn.calls:
                turn.end(messages)
            turn.thoughts.append(text or "".join(part["text"] for part in item["summary"]))
        elif kind == "function_call":
            turn.calls.append(ToolCall(item["call_id"], item["name"], item["arguments"]))
        elif kind == "message" and item["role"] == "assistant":
            if turn.text or turn.calls:
                turn.end(messages)
            turn.text = text
        else:
            turn.end(messages)
            call = item.get("call_id", "")
            messages.append(
                Message(item["role"], text)
                if kind == "message"
                else Message("tool", item["output"], tool_call_id=call, name=names.get(call, ""))
            )
    turn.end(messages)
    return messages


class _Turn:
    """What an assistant does until somebody else has the word."""

    def __init__(self) -> None:
        self.text = ""
        self.thoughts: list[str] = []
        self.calls: list[ToolCall] = []

    def end(self, messages: list[Message]) -> None:
        """Add it to the messages, if there is anything."""
        if self.text or self.thoughts or self.calls:
            messages.append(Message("assistant", self.text, "".join(self.thoughts), tuple(self.calls)))
        self.text, self.thoughts, self.calls = "", [], []
