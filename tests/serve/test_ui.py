"""The page's files, and what they ask the server for."""

from __future__ import annotations

import re
import threading

import httpx

from gristmill import LLM
from gristmill.serve.service import Service
from tests.serve.scripted import ScriptedEngine
from tests.serve.server import service_of, serving, until_ready


def test_the_page_loads_nothing_from_elsewhere(url: str) -> None:
    """Every address in it is the server's own, and its policy allows no other."""
    page = httpx.get(f"{url}/ui")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for name in re.findall(r'(?:src|href)="([^"]+)"', page.text):
        if not name.startswith(("#", "data:")):
            assert httpx.get(f"{url}/{name}").status_code == 200
    for name in ("ui/page.css", "ui/page.js"):
        text = httpx.get(f"{url}/{name}").text
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text + page.text)


def test_state_and_kernels(url: str) -> None:
    """What the page draws."""
    httpx.post(f"{url}/v1/completions", json={"prompt": "The", "max_tokens": 4}, timeout=60)
    state = httpx.get(f"{url}/ui/state").json()
    assert state["state"] == "ready"
    assert state["engines"][0]["num_blocks"] > 0
    kernels = httpx.get(f"{url}/ui/kernels").json()["kernels"]
    assert {row["op"] for row in kernels} >= {"linear", "fused_add_rms_norm"}


def test_loading_is_shown(llm: LLM) -> None:
    """/ready and the page say which phase of loading it is, and how much of it is done, of the replica that is behind; then neither does."""
    loaded = threading.Event()
    service = service_of(llm)

    def load(service: Service) -> ScriptedEngine:
        loaded.wait(30)
        return ScriptedEngine()

    with serving(service, load) as url:
        for rows, phase, fraction in (
            ({}, "starting", None),
            ({0: ("weights", 0, 0)}, "weights", None),
            ({0: ("verification", 3, 4), 1: ("weights", 42, 100)}, "weights", 0.42),
            ({0: ("verification", 3, 4), 1: ("verification", 1, 4)}, "verification", 0.25),
        ):
            service.loading = rows
            ready = httpx.get(f"{url}/ready")
            assert ready.status_code == 503
            assert int(ready.headers["retry-after"]) > 0
            body = ready.json()
            assert (body["status"], body["phase"], body["fraction"]) == ("loading", phase, fraction)
            assert body["error"]["code"] == "loading"
            state = httpx.get(f"{url}/ui/state").json()
            assert state["loading"] == {"phase": phase, "fraction": fraction}
        assert httpx.get(f"{url}/health").status_code == 200
        loaded.set()
        until_ready(service)
        assert httpx.get(f"{url}/ready").json() == {"status": "ready", "model": service.name}
        assert httpx.get(f"{url}/ui/state").json()["loading"] is None
        service.restarting, service.loading = True, {0: ("weights", 1, 2)}
        body = httpx.get(f"{url}/ready").json()
        assert (body["error"]["code"], body["phase"], body["fraction"]) == ("restarting", "weights", 0.5)
        service.failed = True
        failed = httpx.get(f"{url}/ready").json()
        assert failed["error"]["code"] == "engine_failed" and "phase" not in failed
        assert httpx.get(f"{url}/ui/state").json()["state"].startswith("failed")
        service.failed = service.restarting = False
