"""The parts of one completion as events of OpenAI's responses API. The response is what they add up to: that of the last event."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from gristmill.runtime.completion import Chunk
from gristmill.serve.blocks import Blocks, Step
from gristmill.serve.encoding import encode
from gristmill.serve.errors import ApiError
from gristmill.serve.generation import Generation, Part
from gristmill.serve.responses.items import Item, new_id

Event = dict[str, Any]
ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""Of failed responses, by HTTP status; others are server errors."""


class ResponseEvents:
    """The events of one response, numbered from 0.

    Args:
        response: the response without output, status in_progress.
        usage: the tokens so far.
        logprobs: those of a chunk as the API has them; None = not asked for.

    Attributes:
        response: as of the last event.
    """

    def __init__(
        self,
        response: Item,
        usage: Callable[[], dict[str, Any]],
        logprobs: Callable[[Chunk], list[Any]] | None,
    ) -> None:
        self.response = response
        self._usage, self._logprobs = usage, logprobs
        self._blocks = Blocks()
        self._number = 0
        self._texts: list[str] = []  # of the open item
        self._entries: list[Any] = []  # log-probabilities of the open text
        self._waiting: list[Any] = []  # of tokens whose text is held back
        self._item: Item = {}

    def start(self) -> list[Event]:
        """Before the first part."""
        return [self._whole("response.created"), self._whole("response.in_progress")]

    def of(self, part: Part) -> list[Event]:
        """What a part adds; the last one completes the response."""
        events: list[Event] = []
        self._note_logprobs(part)
        steps = self._blocks.of(part)
        for number, step in enumerate(steps):
            last = number == len(steps) - 1
            cut = last and (part.finish == "length" or (part.finish == "stop" and step.kind == "call"))
            {"begin": self._begin, "add": self._add, "end": self._end}[step.action](events, step, cut)
        if part.finish is not None:
            events.append(self._complete(part.finish))
        return events

    def _note_logprobs(self, part: Part) -> None:
        """Keep those of text, for when it comes; what cannot be told from thoughts and calls is left out."""
        delta = part.delta
        if self._logprobs is None:
            return
        self._waiting += self._logprobs(part.chunk)
        inside = self._item.get("status") == "in_progress" and self._item["type"] != "message"
        if delta.reasoning or delta.calls or (inside and not delta.content):
            self._waiting = []

    def failed(self, error: ApiError) -> list[Event]:
        """After an error."""
        begin = [] if self._number else self.start()
        code = ERROR_CODES.get(error.status, "server_error")
        self._close("failed", error={"code": code, "message": error.message})
        event = self._event("error", code=error.code or code, message=error.message, param=error.param)
        return [*begin, event, self._whole("response.failed")]

    def cancelled(self) -> None:
        """The response is as far as it got."""
        self._close("cancelled")

    def _close(self, status: str, **more: Any) -> None:
        if self._item.get("status") == "in_progress":
            self._finish_item("incomplete")
        self.response |= {"status": status, "usage": self._usage(), **more}

    def _complete(self, finish: str) -> Event:
        cut = finish == "length"
        self.response |= {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": None if cut else int(time.time()),
            "usage": self._usage(),
        }
        return self._whole("response.incomplete" if cut else "response.completed")

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _whole(self, kind: str) -> Event:
        return self._event(kind, response=self.response | {"output": list(self.response["output"])})

    def _of_item(self, kind: str, **fields: Any) -> Event:
        """An event of the open item."""
        index = len(self.response["output"]) - 1
        return self._event(kind, item_id=self._item["id"], output_index=index, **fields)

    def _begin(self, events: list[Event], step: Step, cut: bool) -> None:
        self._texts, self._entries = [], []
        if step.kind == "thoughts":
            self._item = {"type": "reasoning", "id": new_id("rs"), "summary": [], "content": []}
        elif step.kind == "text":
            self._item = {"type": "message", "id": new_id("msg"), "role": "assistant", "content": []}
        else:
            self._item = {"type": "function_call", "id": new_id("fc"), "arguments": ""}
            self._item |= {"call_id": step.id or new_id("call"), "name": step.name}
        self._item["status"] = "in_progress"
        output = self.response["output"]
        output.append(self._item)
        added = {"output_index": len(output) - 1, "item": dict(self._item)}
        events.append(self._event("response.output_item.added", **added))
        if step.kind != "call":
            part = self._part("")
            events.append(self._of_item("response.content_part.added", content_index=0, part=part))

    def _add(self, events: list[Event], step: Step, cut: bool) -> None:
        self._texts.append(step.text)
        if step.kind == "call":
            events.append(self._of_item("response.function_call_arguments.delta", delta=step.text))
        elif step.kind == "thoughts":
            events.append(self._of_item("response.reasoning_text.delta", content_index=0, delta=step.text))
        else:
            entries, self._waiting = self._waiting, []
            self._entries += entries
            text = {"content_index": 0, "delta": step.text, "logprobs": brief(entries)}
            events.append(self._of_item("response.output_text.delta", **text))

    def _end(self, events: list[Event], step: Step, cut: bool) -> None:
        text = "".join(self._texts)
        if step.kind == "call":
            events.append(self._of_item("response.function_call_arguments.done", arguments=text))
        else:
            done: Item = {"content_index": 0, "text": text}
            if step.kind == "text":
                done["logprobs"] = brief(self._entries)
            kind = "output_text" if step.kind == "text" else "reasoning_text"
            events.append(self._of_item(f"response.{kind}.done", **done))
            part = self._part(text)
            events.append(self._of_item("response.content_part.done", content_index=0, part=part))
        self._finish_item("incomplete" if cut else "completed")
        index = len(self.response["output"]) - 1
        events.append(self._event("response.output_item.done", output_index=index, item=self._item))

    def _finish_item(self, status: str) -> None:
        text = "".join(self._texts)
        if self._item["type"] == "function_call":
            self._item["arguments"] = text
        else:
            self._item["content"] = [self._part(text)]
        self._item["status"] = status

    def _part(self, text: str) -> Item:
        if self._item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._entries)}


def brief(entries: list[Any]) -> list[Any]:
    """Log-probabilities as events have them: without bytes."""
    return [
        {
            "token": one["token"],
            "logprob": one["logprob"],
            "top_logprobs": [{"token": t["token"], "logprob": t["logprob"]} for t in one["top_logprobs"]],
        }
        for one in entries
    ]


def written(events: Sequence[Event]) -> list[bytes]:
    """Events as a stream has them."""
    return [b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event)) for event in events]


def usage(generation: Generation) -> dict[str, Any]:
    """``usage`` of a response."""
    return {
        "input_tokens": generation.prompt_tokens,
        "input_tokens_details": {"cached_tokens": generation.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": generation.output_tokens,
        "output_tokens_details": {"reasoning_tokens": generation.reasoning_tokens},
        "total_tokens": generation.prompt_tokens + generation.output_tokens,
    }
