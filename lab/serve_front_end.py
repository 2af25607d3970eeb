"""The server's front end over an engine that costs nothing: what its process spends on a request, how much it delays tokens, whether it grows.

    python -m lab.serve_front_end --out FILE
    python -m lab.serve_front_end --url http://127.0.0.1:8200 --pid PID     another server that is running, with such an engine

The engine is one in the server's own process that yields a word per step, as vLLM's front end is measured with a mock of its
EngineClient. The client is this process: raw sockets, the body prepared once. Rows:

requests    `--clients` connections, one request after another, `--tokens` streamed tokens each: requests per second, and CPU milliseconds of
            the server per request
streams     `--streams` at once, a token every 50 ms each: the delay from the moment that the engine yields a token, which is its text, to
            the moment that the client has it
half        requests at half the rate of the first row, at Poisson times, a token every 50 ms: the same delay
memory      resident bytes of the server before and after so many requests
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from gristmill.autotune.device import device_target
from gristmill.autotune.environment import environment
from gristmill.kernel_registry.policy import Policy
from gristmill.runtime.chat.chat import Chat
from gristmill.runtime.completion import Chunk
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.tokenizer import Tokenizer
from gristmill.serve.config import ServeConfig
from gristmill.serve.launch import Server
from gristmill.serve.request_log import RequestLog
from gristmill.serve.service import Service
from lab.result import write_result

MODEL = Path(__file__).parents[1] / "examples" / "models" / "docs-llama"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STEP = 0.05
"""Seconds between two tokens of a stream whose delay is measured."""


class Costless:
    """An engine whose tokens cost nothing. The seed of a request says how they come: 0 = at once, 1 = every STEP, with the time as their text."""

    async def stream(
        self, prompt: Sequence[int], params: SamplingParams | None = None, **others: object
    ) -> AsyncGenerator[Chunk, None]:
        """max_tokens words."""
        params = params or SamplingParams()
        how = params.seed or 0
        for index in range(params.max_tokens):
            await asyncio.sleep(STEP if how == 1 else 0)
            text = f" {time.monotonic():.6f}" if how else " word"
            yield Chunk(0, (5,), text, "length" if index == params.max_tokens - 1 else None)

    async def status(self) -> list[Any]:
        """None."""
        return []

    async def explain(self) -> list[Any]:
        """Nothing ran."""
        return []

    async def drain(self, timeout: float | None = None) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


def serve() -> None:
    """The server's process: prints its address."""
    import uvloop

    tokenizer = Tokenizer(MODEL)
    config = ServeConfig(port=0, log_file="/dev/null")
    service = Service(
        config,
        ("m",),
        tokenizer,
        Chat(MODEL, tokenizer, template=CHATML),
        1 << 20,
        32000,
        {},
        RequestLog(config.log_file),
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(Server(service, lambda service: Costless()).run(lambda url: print(url, flush=True)))


def request(path: str, tokens: int, how: int = 0) -> bytes:
    """The bytes of a request for so many streamed tokens."""
    values: dict[str, Any] = {
        "model": "m",
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
        "seed": how,
    }
    text = "Hello there, how are you today? " * 4
    if "chat" in path:
        values["messages"] = [{"role": "user", "content": text}]
    else:
        values["prompt"] = text
    body = json.dumps(values).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Client:
    """One connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, sent: bytes, delays: list[float] | None = None) -> None:
        """One request and its whole answer; delays of its tokens, whose texts are times."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(sent)
        tail, first = b"", True
        while not tail.endswith(b"0\r\n\r\n"):
            data = await reader.read(1 << 16)
            now = time.monotonic()
            if not data or (first and b" 200 OK" not in data[:20]):
                raise ConnectionError(f"the server answered {(tail + data)[:500]!r}")
            first = False
            tail = (tail + data)[-64:]
            if delays is not None:
                # A word may be cut by the end of what was read: it is left out.
                for piece in data.split(b'"content":" ')[1:]:
                    word, closed, _ = piece.partition(b'"')
                    if closed:
                        delays.append(now - float(word))

    def close(self) -> None:
        """End the connection."""
        if self._streams is not None:
            self._streams[1].close()


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> int:
    """Resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def throughput(
    port: int, pid: int, path: str, requests: int, clients: int, tokens: int
) -> dict[str, Any]:
    """The row ``requests``."""
    sent, left = request(path, tokens), [requests]

    async def work() -> None:
        client = Client(port)
        while left[0] > 0:
            left[0] -= 1
            await client.ask(sent)
        client.close()

    cpu, begin = cpu_seconds(pid), time.perf_counter()
    await asyncio.gather(*(work() for _ in range(clients)))
    seconds = time.perf_counter() - begin
    return {
        "row": "requests",
        "path": path,
        "requests": requests,
        "clients": clients,
        "tokens": tokens,
        "requests_per_second": requests / seconds,
        "cpu_ms_per_request": 1e3 * (cpu_seconds(pid) - cpu) / requests,
    }


def quantiles(delays: list[float]) -> dict[str, Any]:
    """p50, p99 and the largest of delays, in milliseconds."""
    cuts = statistics.quantiles(delays, n=100)
    return {
        "tokens": len(delays),
        "p50_ms": 1e3 * cuts[49],
        "p99_ms": 1e3 * cuts[98],
        "max_ms": 1e3 * max(delays),
    }


async def streams(port: int, count: int, tokens: int) -> dict[str, Any]:
    """The row ``streams``."""
    delays: list[float] = []
    sent = request("/v1/chat/completions", tokens, 1)
    clients = [Client(port) for _ in range(count)]

    async def one(client: Client, wait: float) -> None:
        await asyncio.sleep(wait)
        await client.ask(sent, delays)
        client.close()

    await asyncio.gather(*(one(client, 3.0 * random.random()) for client in clients))
    return {"row": "streams", "streams": count, "step_ms": 1e3 * STEP} | quantiles(delays)


async def half(port: int, rate: float, tokens: int, seconds: float) -> dict[str, Any]:
    """The row ``half``: `rate` requests per second."""
    delays: list[float] = []
    sent = request("/v1/chat/completions", tokens, 1)
    free: list[Client] = []

    async def one() -> None:
        client = free.pop() if free else Client(port)
        await client.ask(sent, delays)
        free.append(client)

    tasks = []
    begin, at = time.monotonic(), 0.0
    while at < seconds:
        await asyncio.sleep(begin + at - time.monotonic())
        tasks.append(asyncio.ensure_future(one()))
        at += random.expovariate(rate)
    await asyncio.gather(*tasks)
    return {"row": "half", "requests_per_second": rate, "requests": len(tasks)} | quantiles(delays)


async def measure(port: int, pid: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows."""
    await throughput(port, pid, "/v1/chat/completions", 100, 8, options.tokens)  # what happens once
    rows = []
    for path in ("/v1/chat/completions", "/v1/completions"):
        for _ in range(options.rounds):
            rows.append(await throughput(port, pid, path, options.requests, options.clients, options.tokens))
    if options.url is None:
        rows.append(await streams(port, options.streams, options.stream_tokens))
        rate = min(row["requests_per_second"] for row in rows[: options.rounds])
        rows.append(await half(port, rate / 2, options.tokens, options.seconds))
        if options.memory:
            before = resident(pid)
            await throughput(port, pid, "/v1/completions", options.memory, options.clients, 2)
            rows.append(
                {"row": "memory", "requests": options.memory, "before": before, "after": resident(pid)}
            )
    return rows


def main() -> None:
    """Measure."""
    if sys.argv[1:] == ["--serve"]:
        serve()
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--stream-tokens", type=int, default=100, help="of the row streams")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the row half")
    parser.add_argument("--memory", type=int, default=0, help="requests of the row memory; 0 = no such row")
    parser.add_argument("--url", help="a server that is running, of which the first rows are measured")
    parser.add_argument("--pid", type=int, help="its process")
    parser.add_argument("--name", default="gristmill", help="what it is, for the result file")
    parser.add_argument("--out", help="result file")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 16), hard))
    child = None
    if options.url is None:
        child = subprocess.Popen(
            [sys.executable, "-m", "lab.serve_front_end", "--serve"], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        url, pid = child.stdout.readline().strip(), child.pid
    else:
        url, pid = options.url, options.pid
    gc.freeze()  # the client's own pauses are no delay of the server
    try:
        rows = asyncio.run(measure(int(url.rpartition(":")[2]), pid, options))
    finally:
        if child is not None:
            child.terminate()
            child.wait(20)
    for row in rows:
        print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}))
    command = " ".join(["python -m lab.serve_front_end", *sys.argv[1:]])
    if options.out:
        write_result(
            options.out,
            {
                "command": command,
                "environment": environment(device_target("cpu", Policy.current()), command),
                "server": options.name,
                "rows": rows,
            },
        )


if __name__ == "__main__":
    main()
