"""The server behind nginx, with the configuration of docs/deploy.md: streams come as they are made, a client that leaves is noticed."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gristmill import LLM
from tests.serve.scripted import ScriptedEngine
from tests.serve.server import ROOT, service_of, serving
from tests.serve.test_rules import ASK, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed"),
]


@pytest.fixture
def proxied(llm: LLM, tmp_path: Path) -> Iterator[tuple[str, ScriptedEngine]]:
    """(the address at nginx, the engine)."""
    page = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    found = re.search(r"```nginx\n(.*?)```", page, re.S)
    assert found is not None
    engine = ScriptedEngine(seconds=0.1)
    with serving(service_of(llm, root_path="/llm"), lambda service: engine) as url:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        location = found[1].replace("http://127.0.0.1:8000", url.removesuffix("/llm"))
        folders = "".join(
            f"{name}_temp_path {tmp_path}/{name};"
            for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        (tmp_path / "nginx.conf").write_text(
            f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/error.log; events {{}}\n"
            f"http {{ access_log off; {folders} server {{ listen 127.0.0.1:{port}; {location} }} }}"
        )
        process = subprocess.Popen(["nginx", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")])
        try:
            address = f"http://127.0.0.1:{port}/llm"
            wait_for(lambda: _status(f"{address}/ready") == 200)
            yield address, engine
        finally:
            process.terminate()
            process.wait(10)


def _status(url: str) -> int:
    try:
        return httpx.get(url).status_code
    except httpx.ConnectError:
        return 0


def test_streams_are_not_buffered(proxied: tuple[str, ScriptedEngine]) -> None:
    """The second part is made when the first one has come."""
    url, engine = proxied
    engine.go_on.clear()
    parts = 0
    with httpx.stream(
        "POST", f"{url}/v1/completions", json={**ASK, "max_tokens": 10, "stream": True}
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                parts += 1
                engine.go_on.set()
    assert parts == 11


def test_a_client_that_leaves(proxied: tuple[str, ScriptedEngine]) -> None:
    """nginx closes its connection, so the request ends."""
    url, engine = proxied
    with httpx.stream(
        "POST", f"{url}/v1/completions", json={**ASK, "max_tokens": 1000, "stream": True}
    ) as answer:
        next(answer.iter_lines())
    wait_for(lambda: engine.left == 1)


def test_the_page(proxied: tuple[str, ScriptedEngine]) -> None:
    """Its files are found under the prefix."""
    page = httpx.get(f"{proxied[0]}/ui")
    assert page.status_code == 200
    for name in re.findall(r'(?:src|href)="(ui/[^"]+)"', page.text):
        assert httpx.get(f"{proxied[0]}/{name}").status_code == 200
