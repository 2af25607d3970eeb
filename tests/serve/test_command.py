"""`gristmill serve` as users start it: a process that answers, drains on SIGTERM, and ends with status 0."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests import forked
from tests.serve.server import CHATML, MODEL, ROOT
from tests.serve.test_rules import wait_for

pytestmark = pytest.mark.timeout(180)


@contextmanager
def command(
    log: Path, *arguments: str, own: bool = False
) -> Iterator[tuple[str, subprocess.Popen[str] | forked.Process]]:
    """(address, process) of a server: a fork whose engine is one too, or, if `own`, processes that begin with their own interpreter."""
    line = ["-m", "gristmill.tools.cli", "serve", *arguments, "--port", "0", "--log-file", str(log)]
    end, to_it = os.pipe()
    process: subprocess.Popen[str] | forked.Process
    if own:
        process = subprocess.Popen([sys.executable, *line], stderr=to_it, text=True, cwd=ROOT)
    else:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        descriptors = {1: 1, 2: to_it}
        process = forked.Process(line, descriptors, environment, ROOT, imported=forked.RUNTIME)
    os.close(to_it)
    errors = os.fdopen(end)
    try:
        found = None
        for said in errors:  # until it ends
            if found := re.search(r"at (http://127\.0\.0\.1:\d+)", said):
                break
        assert found is not None
        yield found[1], process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        errors.close()


def test_a_server_answers_and_ends(tmp_path: Path, policy_file) -> None:
    """Loading: /health 200, /ready 503. Then both APIs; after SIGTERM it ends."""
    policy_file()
    log = tmp_path / "log"
    options = ("--device", "cpu", "--dtype", "fp32", "--warm", "off", "--chat-template", CHATML)
    with command(log, str(MODEL), "--served-model-name", "m", *options, own=True) as (url, process):
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/ready").status_code in (200, 503)
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200, 120)
        answer = httpx.post(
            f"{url}/v1/completions",
            json={"model": "m", "prompt": "The function returns", "max_tokens": 12, "temperature": 0},
            timeout=60,
        )
        assert answer.json()["choices"][0]["text"] == " a copy of the input.\n\nThe return value is"
        talk = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        assert httpx.post(f"{url}/v1/chat/completions", json=talk, timeout=60).status_code == 200
        assert httpx.post(f"{url}/v1/messages", json={**talk, "model": "m"}, timeout=60).status_code == 200
        metrics = httpx.get(f"{url}/metrics").text
        assert 'vllm:request_success_total{finished_reason="length",model_name="m"} 3.0' in metrics
        assert 'vllm:time_to_first_token_seconds_count{model_name="m"} 3.0' in metrics
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    assert events[0] == "listening"
    assert events[-2:] == ["draining", "ended"] or events[-1] == "ended"


def test_render_only_needs_no_weights(tmp_path: Path) -> None:
    """A directory without weights is enough for what a tokenizer does."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        (folder / name).write_bytes((MODEL / name).read_bytes())
    with command(tmp_path / "log", str(folder), "--render-only", "--chat-template", CHATML) as (url, process):
        assert httpx.get(f"{url}/ready").status_code == 200
        assert httpx.post(f"{url}/tokenize", json={"prompt": "The index"}).json()["count"] > 0
        rendered = httpx.post(f"{url}/render", json={"messages": [{"role": "user", "content": "Hi"}]})
        assert "Hi" in rendered.json()["prompt"]
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 501
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    """The server has begun to listen: it ends with the reason, and no traceback."""
    line = ("-m", "gristmill.tools.cli", "serve", str(MODEL), "--device", "nonsense")
    log = ("--log-file", str(tmp_path / "log"), "--port", "0")
    done = forked.run(*line, *log, cwd=ROOT, imported=forked.RUNTIME)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("gristmill: unknown device 'nonsense'")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere"], "nowhere"),
        ([str(MODEL), "--api-key-file", "/nowhere"], "no file /nowhere"),
        ([str(MODEL), "--chat-format", "hermse"], "no chat format"),
        ([str(MODEL), "--port", "99999"], "port must be"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    """And status 2, before anything is loaded."""
    begin = time.monotonic()
    port = [] if "--port" in arguments else ["--port", "0"]
    line = ("-m", "gristmill.tools.cli", "serve", *arguments, *port)
    done = forked.run(*line, cwd=ROOT, imported=forked.RUNTIME)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert time.monotonic() - begin < 30
