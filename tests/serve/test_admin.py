"""The admin plane of a server with an engine in a process of its own: each action does what it says, and only with its own key."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import httpx
import pytest

from gristmill.runtime.errors import ReplicaError, UsageError
from gristmill.serve.admin import require_done
from gristmill.serve.errors import ApiError
from tests.serve.server import MODEL
from tests.serve.test_command import command
from tests.serve.test_rules import wait_for

pytestmark = pytest.mark.timeout(180)


def test_an_action_that_some_engines_fail() -> None:
    """The answer has the status of the worst failure, and names the engines: what the others did is not all that was asked for."""
    require_done("sleep", [None, None])
    require_done("set_log_level", None)
    with pytest.raises(ApiError) as raised:
        require_done("sleep", [None, UsageError("it sleeps already"), ReplicaError("replica 2 died")])
    assert raised.value.status == 503
    assert raised.value.message == (
        "sleep failed in 2 of 3 engines, and is done in the others: engine 1: UsageError: it sleeps already; "
        "engine 2: ReplicaError: replica 2 died"
    )
    with pytest.raises(ApiError, match="failed in 1 of 1 engines: engine 0: ZeroDivisionError") as raised:
        require_done("profile", [ZeroDivisionError()])
    assert (raised.value.status, raised.value.type) == (500, "server_error")


def test_actions(tmp_path: Path, policy_file) -> None:
    """In the order of an operator's day."""
    policy_file()
    log, keys = tmp_path / "log", tmp_path / "keys"
    keys.write_text("admin-key\n")
    options = (
        "--device",
        "cpu",
        "--dtype",
        "fp32",
        "--warm",
        "off",
        "--admin-port",
        "0",
        "--admin-key-file",
        str(keys),
    )
    with command(log, str(MODEL), "--served-model-name", "m", *options) as (url, process):
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200, 120)
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        admin = next(line["address"] for line in lines if line["event"] == "admin")
        client = httpx.Client(base_url=admin, headers={"authorization": "Bearer admin-key"}, timeout=60)
        assert httpx.post(f"{admin}/pause").status_code == 401
        assert httpx.post(f"{url}/pause").status_code == 404

        def act(action: str, /, **values: object) -> object:
            answer = client.post(f"/{action}", json=values)
            assert answer.status_code == 200, answer.text
            return answer.json()["result"]

        ask = {"model": "m", "prompt": "The index", "max_tokens": 4, "temperature": 0}

        def text() -> str:
            answer = httpx.post(f"{url}/v1/completions", json=ask, timeout=60)
            return str(answer.json()["choices"][0]["text"])

        before = text()
        [status] = client.get("/status").json()["result"]
        assert status["state"] == "running"
        assert any(row["op"] == "linear" for row in client.get("/explain").json()["result"][0])
        assert "running" in client.get("/dump").json()["result"][0]
        act("pause", mode="keep")
        texts: list[str] = []
        waiting = threading.Thread(target=lambda: texts.append(text()))
        waiting.start()
        wait_for(lambda: client.get("/status").json()["result"][0]["waiting"] == 1)
        assert not texts
        act("resume")
        waiting.join(60)
        assert texts == [before]
        act("sleep", level=1)
        assert client.get("/status").json()["result"][0]["state"] == "sleeping"
        act("wake_up")
        assert text() == before
        act("update_weights", path=str(MODEL))
        act("reset_prefix_cache")
        act("set_log_level", level="warning")
        assert text() == before
        trace = tmp_path / "trace.json"
        profiled = threading.Thread(target=lambda: act("profile", steps=2, path=str(trace)))
        profiled.start()
        wait_for(lambda: bool(text()) and not profiled.is_alive(), 60)
        assert list(tmp_path.glob("trace*"))
        assert client.post("/pause", json={"mode": "never"}).status_code == 400
        assert client.post("/pause", json={"more": 1}).status_code == 400
        assert client.post("/exec", json={}).status_code == 404
        for action, values, cause in (
            ("update_weights", {"path": "/nowhere"}, "engine 0: ConfigError: no model directory /nowhere"),
            ("profile", {"steps": 1, "path": "/nowhere/trace"}, "engine 0: FileNotFoundError: "),
        ):
            answer = client.post(f"/{action}", json=values)
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert error["code"] == "action_failed"
            assert error["message"].startswith(f"{action} failed in 1 of 1 engines: {cause}")
        assert text() == before
        assert client.post("/drain", json={"seconds": -1}).status_code == 400
        assert httpx.get(f"{url}/ready").status_code == 200
        assert client.post("/drain", json={"seconds": 5}).status_code == 200
        assert process.wait(60) == 0
