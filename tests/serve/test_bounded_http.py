"""What a client sends beside bodies has a limit: without one, 240 MB of short headers took 5.6 GB of memory, and a long one a core for minutes."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress

import httpx
import pytest

from gristmill import LLM
from gristmill.serve.bounded_http import MAX_HEAD
from tests.serve.scripted import ScriptedEngine
from tests.serve.server import service_of, serving
from tests.serve.test_rules import ASK, wait_for

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
MOST = 4 << 20
"""Bytes that no client gets rid of: what the server takes, what it reads at once, and what sockets hold."""


def flood(url: str, begin: bytes, more: bytes) -> tuple[int, bytes]:
    """(bytes that the server took, its answer) of a client that sends more and more."""
    sent, answer = 0, b""
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=30) as client:
        client.sendall(begin)
        with suppress(ConnectionError):
            while sent < 2 * MOST:
                client.sendall(more)
                sent += len(more)
                time.sleep(0.001)
        with suppress(ConnectionError):
            answer = client.recv(1 << 16)
    return sent, answer


def asked(url: str, sent: bytes) -> bytes:
    """The answer to bytes after which the client waits."""
    parts = []
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=30) as client:
        client.sendall(sent)
        while part := client.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize(
    ("begin", "more", "said"),
    [
        (b"GET /", b"x" * 65536, True),
        (HEAD + b"A: ", b"x" * 65536, True),
        (HEAD, b"a:b\r\n" * 13000, True),
        (b"", b"\r\n" * 32000, True),
        (CHUNKED + b"1;", b"x" * 65536, False),
        (CHUNKED + b"0\r\n", b"a:b\r\n" * 13000, False),
    ],
    ids=["line", "long header", "headers", "blank lines", "extension of a chunk", "trailers"],
)
def test_a_head_without_end_is_refused(llm: LLM, begin: bytes, more: bytes, said: bool) -> None:
    """With 431, or by the end of the connection where a request has begun already. Others are served."""
    with serving(service_of(llm), lambda service: ScriptedEngine()) as url:
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200)
        sent, answer = flood(url, begin, more)
        assert sent < MOST
        if said and answer:  # what a client has not read is lost where it goes on sending
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 431 ")
            assert json.loads(body)["error"]["code"] == "headers_too_large"
        assert httpx.post(f"{url}/v1/completions", json=ASK).status_code == 200


def test_the_answer_to_a_head_that_is_too_long(llm: LLM) -> None:
    """A client that stops at the limit gets the API's error. Below it, and with bodies of any kind after it, requests are answered."""
    with serving(service_of(llm), lambda service: ScriptedEngine()) as url:
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200)
        answer = asked(url, HEAD + b"A: " + b"x" * MAX_HEAD)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 ") and b"connection: close" in head
        error = json.loads(body)["error"]
        assert error["code"] == "headers_too_large" and f"larger than {MAX_HEAD} bytes" in error["message"]
        with httpx.Client(base_url=url) as client:  # one connection, whose requests do not add up
            for _ in range(4):
                long = {"a": "x" * (MAX_HEAD // 2)}
                assert client.post("/v1/completions", json=ASK, headers=long).status_code == 200
                large = {**ASK, "user": "x" * (4 * MAX_HEAD)}
                assert client.post("/v1/completions", json=large).status_code == 200
            text = json.dumps(large).encode()
            parts = (text[at : at + 7] for at in range(0, len(text), 7))
            assert client.post("/v1/completions", content=parts).status_code == 200
