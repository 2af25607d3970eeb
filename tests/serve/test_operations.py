"""What operators meet: TLS, a full disk under the log, a clock that jumps, sockets that are closed by half, two SIGTERMs; the page's commands."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import socket
import ssl
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from gristmill import LLM
from gristmill.runtime.errors import UsageError
from gristmill.serve.config import ServeConfig
from tests.runtime.pooling.encoder_cases import build, write_tokenizer
from tests.serve.scripted import ScriptedEngine
from tests.serve.server import CHATML, MODEL, ROOT, LocalEngine, service_of, serving
from tests.serve.test_command import command
from tests.serve.test_rules import ASK, wait_for

pytestmark = pytest.mark.timeout(180)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_tls(llm: LLM, tmp_path: Path) -> None:
    """HTTPS with the given certificate, and nothing without it."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )  # fmt: skip
    for wrong in (
        {"tls_certificate": str(key), "tls_key": str(key)},
        {"tls_certificate": __file__, "tls_key": str(key)},
    ):
        with pytest.raises(UsageError, match=r"are not a certificate and its key in PEM: "):
            ServeConfig(**wrong)
    service = service_of(llm, tls_certificate=str(certificate), tls_key=str(key))
    with serving(service, lambda service: ScriptedEngine()) as url:
        assert url.startswith("https://")
        known = ssl.create_default_context(cafile=str(certificate))
        wait_for(lambda: httpx.get(f"{url}/ready", verify=known).status_code == 200)
        answer = httpx.post(f"{url}/v1/completions", json=ASK, verify=known)
        assert answer.status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/health")  # a certificate that nobody has signed
        with pytest.raises(httpx.TransportError):
            httpx.get(url.replace("https", "http") + "/health")


def test_a_full_disk_under_the_log(llm: LLM) -> None:
    """Lines are dropped and counted; requests are answered."""
    service = service_of(llm, log_file="/dev/full")
    with serving(service, lambda service: ScriptedEngine()) as url:
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200)
        for _ in range(20):
            assert httpx.post(f"{url}/v1/completions", json=ASK).status_code == 200
        wait_for(lambda: service.log.dropped >= 20)


def test_a_clock_that_jumps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """No deadline hangs on the wall clock."""
    monkeypatch.setattr(time, "time", lambda: random.uniform(0.0, 4e9))
    engine = ScriptedEngine(seconds=0.02)
    begin = time.monotonic()
    with serving(service_of(llm), lambda service: engine) as url:
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200)
        answer = httpx.post(f"{url}/v1/completions", json={**ASK, "max_tokens": 20, "stream": True})
        assert answer.text.endswith("data: [DONE]\n\n")
    assert engine.left == 0
    assert time.monotonic() - begin < 50


@pytest.mark.parametrize("stream", [True, False])
def test_a_socket_that_is_closed_by_half(llm: LLM, stream: bool) -> None:
    """A client that will send nothing more gets its answer, or its request ends: nothing is left behind."""
    engine = ScriptedEngine(seconds=0.01)
    with serving(service_of(llm), lambda service: engine) as url:
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200)
        host, port = url.removeprefix("http://").split(":")
        body = json.dumps({**ASK, "max_tokens": 1000, "stream": stream}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        with socket.create_connection((host, int(port)), timeout=30) as client:
            client.sendall(head + body)
            wait_for(lambda: engine.active == 1)
            client.shutdown(socket.SHUT_WR)
            wait_for(lambda: engine.active == 0)
        assert httpx.post(f"{url}/v1/completions", json=ASK).status_code == 200


def test_two_sigterms(tmp_path: Path, policy_file) -> None:
    """The first lets a stream go on, the second ends it with an error; no process is left."""
    policy_file()
    options = ("--device", "cpu", "--dtype", "fp32", "--warm", "off", "--drain-seconds", "100")
    with command(tmp_path / "log", str(MODEL), *options) as (url, process):
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200, 120)
        ask = {"prompt": "The index", "max_tokens": 3900, "ignore_eos": True, "stream": True}
        parts = 0
        with httpx.stream("POST", f"{url}/v1/completions", json=ask, timeout=60) as answer:
            try:
                for _ in answer.iter_lines():
                    parts += 1
                    if parts == 10:
                        process.send_signal(signal.SIGTERM)
                    if parts == 40:
                        assert process.poll() is None
                        process.send_signal(signal.SIGTERM)
            except httpx.TransportError:
                pass  # the connection was closed in the middle
        assert 40 <= parts < 3900  # it was cut
        assert process.wait(60) == 0


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_commands_of_the_page(llm: LLM, tmp_path: Path) -> None:
    """Every curl command of docs/serve.md and the README gets an answer of its API."""
    commands = []
    for page in ("docs/serve.md", "README.md"):
        for block in re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S):
            commands += re.findall(r"^curl (?:.*\\\n)*.*$", block, re.M)
    assert len(commands) >= 4
    build("bert", tmp_path)
    write_tokenizer(tmp_path)
    encoder = LLM(tmp_path, dtype="fp32", device="cpu")
    with (
        serving(service_of(llm, chat_template=CHATML), lambda service: ScriptedEngine()) as url,
        serving(service_of(encoder), lambda service: LocalEngine(encoder)) as other,
    ):
        for one in (url, other):
            wait_for(lambda one=one: httpx.get(f"{one}/ready").status_code == 200)
        for line in commands:
            for port, address in ((8000, url), (8001, other), (8002, other)):
                line = line.replace(f"http://127.0.0.1:{port}", address)
            done = subprocess.run(
                [
                    "bash",
                    "-c",
                    line.replace("curl ", "curl -sS --fail ", 1),
                ],
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode == 0, (line, done.stderr)
            assert done.stdout
