"""The page's files, and what they ask the server for."""

from __future__ import annotations

import re

import httpx


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
