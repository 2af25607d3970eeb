"""The events of a stream: server-sent events cut anywhere, and what the chunk of a completion in one of them tells.

This runs once per streamed token, so it reads the few fields that count and keeps nothing else.
"""

from __future__ import annotations

from typing import Any

import msgspec


class _Call(msgspec.Struct, gc=False):
    index: int = 0


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"")


_decode = msgspec.json.Decoder(_Chunk).decode


class StreamError(Exception):
    """What a stream has instead of its next chunk. `kind` is one of few, for counting."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Stream:
    """What is known of one streamed answer.

    Attributes:
        first, last: when its first and its latest chunk with a token came; 0.0 = none yet.
        gaps: seconds between chunks with tokens.
        chunks: how many there were. Servers may put several tokens into one.
        prompt_tokens, output_tokens, cached_tokens: as the server counts them at the end; None where it does not.
        finished: a finish_reason came; done: the end of the stream came.
    """

    __slots__ = (
        "cached_tokens",
        "chunks",
        "done",
        "finished",
        "first",
        "gaps",
        "last",
        "output_tokens",
        "prompt_tokens",
        "_rest",
    )

    def __init__(self) -> None:
        self.first = self.last = 0.0
        self.gaps: list[float] = []
        self.chunks = 0
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.finished = self.done = False
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        """Bytes of the body that came at a time.

        Raises:
            StreamError: an event that is an error, or no chunk.
        """
        if self._rest:
            data = self._rest + data
        if b"\r" in data:  # never inside JSON, which escapes it
            data = data.replace(b"\r\n", b"\n")
        events = data.split(b"\n\n")
        self._rest = events.pop()
        for event in events:
            if event.startswith(b"data: {") and b"\n" not in event:
                self._chunk(event[6:], now)
            elif payload := _payload(event):
                self._chunk(payload, now)

    def _chunk(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self.done = True
            return
        try:
            chunk = _decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StreamError(
                "malformed event", f"{error}: {payload[:200].decode(errors='replace')}"
            ) from None
        if (message := bytes(chunk.error)) not in (b"", b"null"):
            raise StreamError("error event", message[:300].decode(errors="replace"))
        for choice in chunk.choices:
            if choice.text or ((delta := choice.delta) is not None and (
                delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls
            )):  # fmt: skip
                self._token(now)
            if choice.finish_reason is not None:
                self.finished = True
        if (usage := chunk.usage) is not None:
            self.prompt_tokens, self.output_tokens = usage.prompt_tokens, usage.completion_tokens
            if usage.prompt_tokens_details is not None:
                self.cached_tokens = usage.prompt_tokens_details.cached_tokens

    def _token(self, now: float) -> None:
        if self.chunks:
            self.gaps.append(now - self.last)
        else:
            self.first = now
        self.last = now
        self.chunks += 1


def _payload(event: bytes) -> bytes:
    """The data of an event of several lines, comments and fields; b"" if it has none."""
    data = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(data)


def error_message(body: bytes) -> str:
    """What the body of an error says, in any server's shape."""
    try:
        value: Any = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        value = None
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and key in value:
            value = value[key]
    if isinstance(value, str) and value:
        return value[:300]
    return body[:300].decode(errors="replace").strip()
