"""Requests with something wrong in them get an answer or a 4xx with a message in the API's shape; never a 500, a hang, or growth."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill import LLM
from gristmill.serve.service import Service
from tests.runtime.pooling.encoder_cases import build, write_tokenizer
from tests.serve import mutations
from tests.serve.scripted import ScriptedEngine
from tests.serve.server import LocalEngine, service_of, serving, until_ready

COUNT = int(os.environ.get("GRISTMILL_MUTATED_REQUESTS", "2000"))
AT_ONCE = 16


@pytest.fixture
def server(llm: LLM, tmp_path: Path) -> Iterator[tuple[str, Path, Service]]:
    """(address, log, service) of a server whose engine costs nothing."""
    log = tmp_path / "log"
    service = service_of(llm, served_model_name=["m"], log_file=str(log), max_body_bytes=1 << 20)
    with serving(service, lambda service: ScriptedEngine()) as address:
        yield address, log, service


async def ask(port: int, sent: bytes, framed: bool) -> tuple[int, bytes]:
    """(status, body) of a request; status 0 = the server closed the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    try:
        writer.write(sent)
        if not framed and not sent.startswith(b"BREW"):
            writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 30)
    except ConnectionError:
        return 0, b""
    finally:
        writer.close()
    if not answer:
        return 0, b""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def faults(number: int, sent: bytes, framed: bool, status: int, body: bytes) -> list[str]:
    """What is wrong with the answer to a request."""
    if status == 0:  # of half a request: its client has gone
        return [f"{number}: no answer"] if framed else []
    if status == 500 or status > 503 or status == 422:
        return [f"{number}: {status} {body[:200]!r}"]
    if status < 400 or body.startswith(b"Invalid HTTP request"):
        return []
    if sent.startswith((b"HEAD", b"OPTIONS")):
        return []
    fields = {"message", "type"}
    if b" /v1/messages" not in sent.partition(b"\r\n")[0]:
        fields |= {"param", "code"}
    try:
        error = json.loads(body)["error"]
        sound = isinstance(error["message"], str) and bool(error["message"]) and set(error) == fields
    except (ValueError, KeyError, TypeError):
        sound = False
    return [] if sound else [f"{number}: {status} without the API's error: {body[:200]!r}"]


def test_mutated_requests(server: tuple[str, Path, Service]) -> None:
    """None of them hurts the server."""
    check(*server, COUNT)


@pytest.mark.parametrize(
    ("case", "bodies"),
    [("bert", mutations.POOLING_BODIES), ("bert classifier", mutations.CLASSIFYING_BODIES)],
    ids=["embeddings", "classes"],
)
def test_mutated_requests_for_encoders(
    case: str, bodies: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor a server of an encoder."""
    build(case, tmp_path)
    write_tokenizer(tmp_path)
    monkeypatch.setattr(mutations, "BODIES", bodies)
    llm, log = LLM(tmp_path, dtype="fp32", device="cpu"), tmp_path / "log"
    service = service_of(llm, served_model_name=["m"], log_file=str(log), max_body_bytes=1 << 20)
    with serving(service, lambda service: LocalEngine(llm)) as address:
        until_ready(service)
        check(address, log, service, COUNT // 4)


def check(address: str, log: Path, service: Service, count: int) -> None:
    """Send so many requests."""
    port = int(address.rpartition(":")[2])
    statuses: Counter[int] = Counter()
    wrong: list[str] = []

    async def work(numbers: Iterator[int]) -> None:
        for number in numbers:
            sent, framed = mutations.request(number)
            try:
                status, body = await ask(port, sent, framed)
            except TimeoutError:
                wrong.append(f"{number}: no answer within 30 s")
                continue
            statuses[status] += 1
            wrong.extend(faults(number, sent, framed, status, body))

    async def main() -> None:
        numbers = iter(range(count))
        await asyncio.gather(*(work(numbers) for _ in range(AT_ONCE)))

    asyncio.run(main())
    lines = [line for line in log.read_text().splitlines() if '"event":"error"' in line]
    assert not wrong, f"{len(wrong)} of {count}: {wrong[:10]}; {lines[:3]}"
    assert not lines
    assert statuses[200] > count / 20
    assert statuses[400] > count / 10
    until = time.monotonic() + 10  # an answer is there a moment before its handler has ended
    while service.active and time.monotonic() < until:
        time.sleep(0.01)
    assert not service.active


def test_a_wrong_answer_is_noticed() -> None:
    """The check fails for a 500, a missing answer, and an error in another shape."""
    assert faults(1, b"POST", True, 500, b"{}")
    assert faults(1, b"POST", True, 0, b"")
    assert faults(1, b"POST", True, 400, b'{"detail": "wrong"}')
    assert faults(1, b"POST", True, 400, b"<html>")
    sound = b'{"error": {"message": "m", "type": "t", "param": null, "code": null}}'
    assert not faults(1, b"POST", True, 400, sound)
    assert faults(1, b"POST /v1/messages HTTP/1.1", True, 400, sound)


def test_memory_is_flat(server: tuple[str, Path, Service]) -> None:
    """The second thousand of requests takes no memory that the first one did not."""
    port = int(server[0].rpartition(":")[2])

    async def some(first: int) -> None:
        for start in range(first, first + 400, AT_ONCE):
            await asyncio.gather(
                *(ask(port, *mutations.request(number)) for number in range(start, start + AT_ONCE))
            )

    asyncio.run(some(0))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    asyncio.run(some(0))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10
