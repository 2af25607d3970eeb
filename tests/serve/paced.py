"""A server of OpenAI's API that answers at times that a test knows: what a load generator measures is checked against it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Script = Callable[["Paced", dict[str, Any]], AsyncIterator[bytes]]
"""Makes the pieces of an answer, which are sent as they come, of the body of a request."""


@dataclass
class Paced:
    """The server. `running` and `most` are its requests now and at once; `bodies` what was asked; `connections` how many were made."""

    script: Script
    url: str = ""
    running: int = 0
    most: int = 0
    connections: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection."""
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                if head.startswith(b"GET"):
                    writer.write(whole(200, json.dumps({"data": [{"id": "paced-model"}]}).encode()))
                    continue
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                self.bodies.append(body)
                self.running += 1
                self.most = max(self.most, self.running)
                try:
                    async for piece in self.script(self, body):
                        if piece == CUT:
                            writer.transport.abort()
                            return
                        writer.write(piece)
                finally:
                    self.running -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


CUT = b"\x00cut"
"""A piece that closes the connection."""
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def whole(status: int, body: bytes) -> bytes:
    """An answer with a length."""
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


def chunk(data: bytes) -> bytes:
    """A chunk of HTTP."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(**delta: Any) -> bytes:
    """An event with a delta of a chat."""
    finish = delta.pop("finish", None)
    return sse({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def sse(value: Any) -> bytes:
    """An event with a value."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def usage(prompt: int, completion: int) -> bytes:
    """The event with counts."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return sse({"choices": [], "usage": {**counts, "prompt_tokens_details": {"cached_tokens": 3}}})


async def tokens(
    server: Paced, body: dict[str, Any], first: float, gap: float, count: int
) -> AsyncIterator[bytes]:
    """An answer of `count` tokens: the role at once, the first token after `first` seconds, each other one `gap` after it."""
    yield HEAD + chunk(event(role="assistant", content=""))
    for number in range(count):
        await asyncio.sleep(gap if number else first)
        yield chunk(event(content=f" {number}"))
    yield chunk(event(finish="length")) + chunk(usage(7, count)) + chunk(b"data: [DONE]\n\n") + END


@contextmanager
def serving(script: Script) -> Iterator[Paced]:
    """A server in a thread."""
    loop, started, stopped = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    paced = Paced(script)

    async def main() -> None:
        server = await asyncio.start_server(paced.handle, "127.0.0.1", 0)
        paced.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        await stopped.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),), daemon=True)
    thread.start()
    started.wait()
    try:
        yield paced
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join()
        loop.close()
