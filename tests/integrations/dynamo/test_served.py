"""Dynamo's real frontend before our worker, both processes of their own: answers, streams, cancellation, metrics, controls."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gristmill import LLM, SamplingParams
from tests.integrations.ports import free_port
from tests.runtime.oracle import LLAMA, MODELS

MODEL = str(MODELS / LLAMA)
BODY = {"model": LLAMA, "prompt": "The index", "max_tokens": 12, "temperature": 0}


def wait_for(condition: Callable[[], bool], seconds: float, log: Path | None = None) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if condition():
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"not within {seconds} s:\n{log.read_text()[-4000:] if log else ''}")


@pytest.fixture(scope="module")
def served(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """(address of the frontend, address of the worker's system server). The worker's steps are slow."""
    folder, http, system = tmp_path_factory.mktemp("served"), free_port(), free_port()
    log = folder / "worker.log"
    worker = [sys.executable, "-m", "tests.integrations.slow_steps", "gristmill.integrations.dynamo"]
    worker += ["--model", MODEL]
    worker += ["--discovery-backend", "file", "--option", "dtype=fp32", "--option", "num_blocks=512"]
    front = [sys.executable, "-m", "dynamo.frontend", "--http-port", str(http)]
    front += ["--discovery-backend", "file", "--router-mode", "kv"]
    processes = []
    try:
        for line, file, more in (
            (worker, log, {"DYN_SYSTEM_PORT": str(system)}),
            (front, folder / "front.log", {}),
        ):
            with file.open("w") as out:
                processes.append(
                    subprocess.Popen(line, env={**environment, **more}, stdout=out, stderr=subprocess.STDOUT)
                )
        address = f"http://127.0.0.1:{http}"
        wait_for(lambda: LLAMA in httpx.get(f"{address}/v1/models", timeout=60).text, 300, log)
        # The first request verifies kernels.
        assert httpx.post(f"{address}/v1/completions", json=BODY, timeout=300).status_code == 200
        yield address, f"http://127.0.0.1:{system}"
        processes[0].terminate()
        assert processes[0].wait(180) == 0, log.read_text()[-4000:]
    finally:
        for process in processes:
            process.kill()
            process.wait(60)


@pytest.fixture(scope="module")
def expected(environment: dict[str, str]) -> str:
    return (
        LLM(MODEL, dtype="fp32", num_blocks=512).generate("The index", SamplingParams(max_tokens=12))[0].text
    )


def metric(system: str, name: str, label: str = "") -> float:
    """The sum over the values whose labels contain `label`; 0 if there is none."""
    lines = httpx.get(f"{system}/metrics", timeout=60).text.splitlines()
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{") and label in line
    )


def test_an_answer_and_a_stream(served: tuple[str, str], expected: str) -> None:
    answer = httpx.post(f"{served[0]}/v1/completions", json=BODY, timeout=60).json()
    assert answer["choices"][0]["text"] == expected
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 12
    with httpx.stream(
        "POST", f"{served[0]}/v1/completions", json={**BODY, "stream": True}, timeout=60
    ) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: ")]
    chunks: list[dict[str, Any]] = [json.loads(line) for line in lines if line != "[DONE]"]
    assert lines[-1] == "[DONE]"
    assert "".join(choice["text"] or "" for chunk in chunks for choice in chunk["choices"]) == expected


def test_a_client_that_goes_away(served: tuple[str, str]) -> None:
    body = {**BODY, "max_tokens": 3000, "stream": True, "ignore_eos": True}

    def running() -> float:
        return metric(served[1], "gristmill:num_requests_running")

    def aborted() -> float:
        return metric(served[1], "gristmill:request_success_total", 'finished_reason="abort"')

    before = aborted()
    with httpx.stream("POST", f"{served[0]}/v1/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        wait_for(lambda: running() == 1, 30)
        del lines
    # Sooner than its last token, a minute and a half after the first one.
    wait_for(lambda: running() == 0 and aborted() == before + 1, 45)


def test_metrics_and_controls(served: tuple[str, str]) -> None:
    assert metric(served[1], "gristmill:generation_tokens_total") >= 12
    wait_for(lambda: metric(served[1], "dynamo_component_total_blocks") == 512, 60)
    reset = httpx.post(f"{served[1]}/engine/control/reset_prefix_cache", json={}, timeout=60)
    assert reset.status_code == 200 and reset.json()["status"] == "ok"
    wrong = httpx.post(f"{served[1]}/engine/control/sleep", json={"level": 7}, timeout=60)
    assert "level must be 1 or 2" in wrong.text


def test_an_option_that_is_not_served(served: tuple[str, str]) -> None:
    body = {**BODY, "best_of": 3}
    answer = httpx.post(f"{served[0]}/v1/completions", json=body, timeout=60)
    assert 400 <= answer.status_code < 600
