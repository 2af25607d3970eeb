"""The server when its engine is killed: told in the log, started again, and answered by."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import httpx

from tests.serve.server import CHATML, MODEL
from tests.serve.test_command import command
from tests.serve.test_rules import wait_for


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    folder = Path(f"/proc/{pid}/task")
    return [int(child) for task in folder.iterdir() for child in (task / "children").read_text().split()]


def test_an_engine_that_is_killed_is_started_again(tmp_path: Path, policy_file) -> None:
    """A stream that has begun ends with an error in its own API's shape; /ready says 503 meanwhile, /health 200."""
    policy_file()
    log = tmp_path / "log"
    options = ("--device", "cpu", "--dtype", "fp32", "--warm", "off", "--chat-template", CHATML)
    with command(log, str(MODEL), *options) as (url, process):
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200, 120)
        [engine] = children(process.pid)
        body = {"prompt": "The function", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            os.kill(engine, signal.SIGKILL)
            rest = [line for line in lines if line]
        assert any("error" in json.loads(line[6:]) for line in rest if line.startswith("data: {"))
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 503, 10)
        assert httpx.get(f"{url}/health").status_code == 200
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "restarting"
        assert int(refused.headers["retry-after"]) > 0
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200, 60)
        again = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=60)
        assert again.status_code == 200 and children(process.pid) != [engine]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    assert events.index("replica_died") < events.index("replica_restarted")


def test_an_engine_that_keeps_dying_is_given_up(tmp_path: Path, policy_file) -> None:
    """The first death is made good; after the second, /health and /ready say 503, requests too, and nothing is started again."""
    policy_file()
    log = tmp_path / "log"
    options = ("--device", "cpu", "--dtype", "fp32", "--warm", "off", "--restarts", "1")
    with command(log, str(MODEL), *options) as (url, process):
        for deaths in range(2):
            wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200, 120)
            assert httpx.get(f"{url}/health").status_code == 200
            [engine] = children(process.pid)
            os.kill(engine, signal.SIGKILL)
            event = ("replica_died", "replica_given_up")[deaths]
            wait_for(lambda event=event: event in log.read_text(), 20)  # type: ignore[misc]
        for path in ("health", "ready"):
            answer = httpx.get(f"{url}/{path}")
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "engine_failed"
            assert "SIGKILL" in answer.json()["error"]["message"]
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_failed"
        assert children(process.pid) == []
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
