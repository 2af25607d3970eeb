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


def test_an_engine_that_is_killed_is_started_again_and_given_up_when_it_keeps_dying(
    tmp_path: Path, policy_file
) -> None:
    """A stream that has begun ends with an error in its own API's shape; /ready says 503 meanwhile, /health 200. After the second death both
    say 503, requests too, and nothing is started again."""
    policy_file()
    log = tmp_path / "log"
    options = ("--device", "cpu", "--dtype", "fp32", "--warm", "off", "--restarts", "1")
    with command(log, str(MODEL), *options, "--chat-template", CHATML, own=True) as (url, process):
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200, 120)
        [engine] = children(process.pid)
        body = {"prompt": "The function", "max_tokens": 3900, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            os.kill(engine, signal.SIGKILL)
            rest = [line for line in lines if line]
        assert any("error" in json.loads(line[6:]) for line in rest if line.startswith("data: {"))
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 503)
        assert httpx.get(f"{url}/health").status_code == 200
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "restarting"
        assert int(refused.headers["retry-after"]) > 0
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200, 60)
        assert httpx.get(f"{url}/health").status_code == 200
        again = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=60)
        assert again.status_code == 200
        [other] = children(process.pid)
        assert other != engine

        os.kill(other, signal.SIGKILL)
        wait_for(lambda: "replica_given_up" in log.read_text())
        for path in ("health", "ready"):
            answer = httpx.get(f"{url}/{path}")
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "engine_failed"
            assert "SIGKILL" in answer.json()["error"]["message"]
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_failed"
        assert children(process.pid) == []
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    assert events.index("replica_died") < events.index("replica_restarted") < events.index("replica_given_up")
